"""A job file: imported by path, its `job` function found, called, and its mistakes named."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimaran.errors import JobError, TrimaranError, UsageError
from trimaran.job import Job


def require_job_first(words: Sequence[str], program: str) -> None:
    """Raises UsageError where a verb's first word is no job file; a first --help is let through."""
    if words and (not words[0].startswith("-") or words[0] in ("-h", "--help")):
        return
    raise UsageError(
        f"{program} was given {words[0]!r} before the job file." if words else f"{program} was given no job file.",
        "The job file comes first: its arguments are flags, too.",
        f"Write {program} JOB.py, then the flags.",
    )


def load_job_function(path: Path) -> Callable[..., Any]:
    """The `job` function of the file, which is imported; its folder can be imported from.

    Raises UsageError where there is no such file, JobError where it does not import or has no `job`.
    """
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        near = sorted(str(each) for each in folder.glob("*.py")) if folder.is_dir() else []
        raise UsageError(
            f"{str(path)!r} is a folder." if path.is_dir() else f"There is no job file {str(path)!r}.",
            "A job file is a Python file with a function job().",
            f"Job files nearby: {', '.join(near[:5])}." if near else "Check the path.",
        )
    spec = importlib.util.spec_from_file_location(f"job_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} is not a Python file.", "A job file's name ends in .py.", "Give a .py file.")
    # What torch needs of the standard library is loaded before the job's folder, where a file may be called queue.py.
    importlib.import_module("torch")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and loader workers look their module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except TrimaranError:
        raise
    except (Exception, SystemExit) as problem:
        raise JobError(
            f"{path} does not import: {describe_problem(problem)}.",
            "A job file is imported like any Python module.",
            "Correct it; --traceback shows where.",
        ) from problem
    function = getattr(module, "job", None)
    if function is None:
        raise JobError(f"{path} has no job.", "A job file defines job(...) -> tm.Job.", "Add a function named job.")
    if not callable(function):
        raise JobError(
            f"job in {path} is {type(function).__name__}, not a function.",
            "Its arguments become flags, so it is called by the command.",
            "Write def job(...) -> tm.Job.",
        )
    return function  # type: ignore[no-any-return]


def call_job_function(function: Callable[..., Any], arguments: Mapping[str, Any], path: Path) -> Job:
    """The job, named after its file where it has no name. Raises JobError for what `job()` raises or returns."""
    try:
        job = function(**arguments)
    except TrimaranError:
        raise
    except (Exception, SystemExit) as problem:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise JobError(
            f"job({given}) raised {describe_problem(problem)}.",
            "It builds the description of what is trained.",
            "Correct it, or the arguments; --traceback shows where.",
        ) from problem
    if not isinstance(job, Job):
        raise JobError(
            f"job() in {path} returned {type(job).__name__}.", "It returns a trimaran.Job.", "Write return tm.Job(...)."
        )
    return job if job.name else replace(job, name=path.stem)


def describe_problem(problem: BaseException) -> str:
    """An exception in one line, with the innermost place in code that is neither ours nor a library's."""
    text = problem.msg if isinstance(problem, SyntaxError) else " ".join(str(problem).split())
    said = f"{type(problem).__name__}: {text}" if text else type(problem).__name__
    place = innermost_place(problem)
    return f"{said}, at {place}" if place else said


def innermost_place(problem: BaseException) -> str:
    """ "file:line: source" of the innermost frame in code that is neither ours nor a library's; empty for none."""
    if isinstance(problem, SyntaxError):
        return f"{problem.filename}:{problem.lineno}"
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename)
    libraries = [Path(__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))]
    return "site-packages" not in path.parts and not any(each in path.parents for each in libraries)
