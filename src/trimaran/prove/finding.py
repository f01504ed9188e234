"""What a check found: passed, failed, or skipped with the reason; mistakes of the job's code are findings too."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trimaran.errors import TrimaranError

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check's result. `value` says what was seen (or why nothing was looked at), `rule` what holds in general.

    A failed one has a `remedy`, what to do now. All three are sentences, or parts of one. `traceback` is there where
    the job's own code raised something.
    """

    name: str
    status: Status
    value: str
    rule: str = ""
    remedy: str = ""
    traceback: str = field(default="", repr=False, compare=False)


def passed(name: str, value: str, rule: str = "") -> Finding:
    """Fine; `value` is what was measured."""
    return Finding(name, "passed", value, rule)


def failed(name: str, value: str, rule: str, remedy: str) -> Finding:
    """Not fine."""
    return Finding(name, "failed", value, rule, remedy)


def skipped(name: str, reason: str) -> Finding:
    """Nothing can be said, and why."""
    return Finding(name, "skipped", reason)


def failed_by(name: str, problem: Exception) -> Finding:
    """What an exception says, as a finding, with the line of the job's own code that raised it."""
    trace = "".join(traceback.format_exception(problem))
    if isinstance(problem, TrimaranError):
        place = _place(problem.__cause__ or problem)
        value = f"{problem.value.rstrip('.')}{place}." if place else problem.value
        return Finding(name, "failed", value, problem.rule, problem.remedy, trace)
    value = f"{type(problem).__name__}: {' '.join(str(problem).split())}{_place(problem)}."
    rule, remedy = "The job's own code runs as in plain PyTorch.", "Correct it; --traceback shows where."
    return Finding(name, "failed", value, rule, remedy, trace)


def guarded(names: Sequence[str], findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of checks so named, in this order. One that raises has failed, and those after it are skipped."""
    left = list(names)
    try:
        for finding in findings:
            left.remove(finding.name)
            yield finding
    except Exception as problem:
        yield failed_by(left[0], problem)
        yield from skip(left[1:], f"the check before it ({left[0]}) raised {type(problem).__name__}")


def skip(names: Iterable[str], reason: str) -> Iterator[Finding]:
    """All of them skipped for one reason."""
    return (skipped(name, reason) for name in names)


def _place(problem: BaseException) -> str:
    """Where in the job's own code it was raised, if anywhere there."""
    ours = Path(__file__).parents[1]
    library = Path(sysconfig.get_path("stdlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if "site-packages" not in frame.filename and not {ours, library} & set(Path(frame.filename).parents)
    ]
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
