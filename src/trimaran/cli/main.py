"""The command `trimaran`: finds the verb, runs it, and turns errors into words and an exit code."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from trimaran.cli.job_file import describe_problem, innermost_place
from trimaran.errors import JobError, TrimaranError, UsageError
from trimaran.world.environment import record_failure

VERBS = {
    "new": "write a job file to start from",
    "check": "start small: does the job learn at all?",
    "verify": "is a layout the same as one process?",
    "train": "train a job on one process or on many",
    "export": "write the weights of a checkpoint for other programs",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 done, 1 failed, 2 wrong usage, 75 stopped after saving, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words[: words.index("--")] if "--" in words else words
    return run_safely(lambda: _run(words), show_traceback="--traceback" in own)


def run_safely(action: Callable[[], int], *, show_traceback: bool) -> int:
    """The exit code that `action` returns; an error becomes words, here or at our own launcher, and a code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal's encoding ends no run
    try:
        return action()
    except BrokenPipeError:  # whoever read this has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as problem:
        error = _named(problem)
        _report(error, show_traceback=show_traceback)
        _release_frames(problem)
        return error.exit_code if isinstance(error, TrimaranError) else 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from importlib.metadata import version  # slow to import, and needed here only

        print(f"trimaran {version('trimaran')}")
        return 0
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1)
        raise UsageError(
            f"{words[0]!r} is no verb of trimaran.",
            f"Verbs: {', '.join(VERBS)}.",
            f"Did you mean {close[0]!r}?" if close else "See trimaran --help.",
        )
    verb = importlib.import_module(f"trimaran.cli.{words[0]}")
    code: int = verb.main(words[1:])
    return code


def _help() -> str:
    lines = ["usage: trimaran VERB ...", "", *(f"  {verb:<10} {what}" for verb, what in VERBS.items())]
    return "\n".join([*lines, "", "trimaran VERB --help tells more; with a job file, also the job's own arguments."])


def _release_frames(problem: BaseException | None) -> None:
    """Lets go of what the frames hold: process groups, whose threads would else outlast the interpreter's end."""
    while problem is not None:
        traceback.clear_frames(problem.__traceback__)
        problem = problem.__cause__ or problem.__context__


def _report(error: BaseException, *, show_traceback: bool) -> None:
    """Prints once what went wrong: here, or, in a worker of our own launcher, there."""
    if record_failure(error) and not show_traceback:
        return
    if show_traceback:
        traceback.print_exception(error)
    more = "" if isinstance(error, TrimaranError) else "\n--traceback shows where."
    print(f"{type(error).__name__}: {error}{more}", file=sys.stderr)


def _named(problem: Exception) -> Exception:
    """The error with the line of the job's own code it comes from, if any; a foreign one from there as a JobError."""
    cause = problem.__cause__ if isinstance(problem, TrimaranError) else problem
    place = innermost_place(cause) if cause is not None else ""
    if isinstance(problem, TrimaranError):
        if place and place not in problem.value:
            problem.value = f"{problem.value.rstrip('.')}, at {place}."
        return problem
    if not place:
        return problem
    error = JobError(f"{describe_problem(problem)}.", "The job's own code raised it.", "--traceback shows where.")
    error.__cause__ = problem
    return error
