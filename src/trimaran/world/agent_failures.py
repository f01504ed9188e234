"""Why workers ended: written by each as a small JSON file, and read by the launcher, which names the first cause."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trimaran import errors
from trimaran.errors import TrimaranError, WorkerError

STOPPED_AFTER_SAVING = 75

# What a worker says when it has only noticed that another one is gone.
_ECHOES = (
    "gloo/transport",
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "timed out wait",
    "did not meet the others",
)
_RULE = "A run needs every one of its workers, so the others were stopped."
_SIGNAL_REMEDIES = {
    signal.SIGKILL: "If memory ran out (the kernel's log, dmesg, says so), use a smaller micro_batch or fewer workers; "
    "otherwise somebody killed it: start it again.",
    signal.SIGBUS: "Shared memory or a disk may be full: see df -h /dev/shm, or use num_workers=0.",
    signal.SIGTERM: "Somebody ended this one worker. To stop a run, signal the process that started it.",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a worker wrote about its own end: the three sentences for an error of ours, `text` for any.

    `where` is the innermost line that is neither ours nor a library's, as "job.py:12: x = model(y)", or empty.
    """

    time_seconds: float
    type: str
    text: str
    traceback: str
    where: str
    exit_code: int
    is_ours: bool = False
    value: str = ""
    rule: str = ""
    remedy: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it only says that another worker is gone."""
        return any(echo in self.text.lower() for echo in _ECHOES)


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How one worker ended.

    `exit_code` is negative for a signal, `time_seconds` is when the worker was last seen alive (what its end set off
    in others comes later), `stopped` means that it ended as the launcher told it to.
    """

    rank: int
    pid: int
    exit_code: int
    time_seconds: float
    stopped: bool
    failure: Failure | None

    @property
    def is_failure(self) -> bool:
        """Whether the worker failed on its own account."""
        if self.failure is not None:
            return True
        return not self.stopped and self.exit_code not in (0, STOPPED_AFTER_SAVING)


def write_failure(path: Path, error: BaseException) -> bool:
    """Write `error` to `path` at once or not at all; a first failure is not overwritten. False if it cannot be."""
    ours = error if isinstance(error, TrimaranError) else None
    failure = Failure(
        time_seconds=time.time(),
        type=type(error).__name__,
        text=str(error),
        traceback="".join(traceback.format_exception(error)),
        where=_where(error),
        exit_code=ours.exit_code if ours else 1,
        is_ours=ours is not None,
        value=ours.value if ours else "",
        rule=ours.rule if ours else "",
        remedy=ours.remedy if ours else "",
    )
    partial = path.with_suffix(".partial")
    try:
        if not path.exists():
            partial.write_text(json.dumps(asdict(failure)), encoding="utf-8", errors="backslashreplace")
            os.replace(partial, path)
    except OSError:
        return False
    return True


def read_failure(path: Path) -> Failure | None:
    """What `write_failure` left at `path`, or None."""
    return Failure(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def explain(ends: Sequence[WorkerEnd]) -> TrimaranError | None:
    """The error to show for workers that ended so, or None when none failed.

    An error of ours that all ranks share is returned as it was. Otherwise a WorkerError names the first cause in
    time, passing over those that only noticed that another worker was gone.
    """
    failed = [end for end in ends if end.is_failure]
    if not failed:
        return _explain_disagreement(ends)
    shared = _shared_error(ends)
    if shared is not None:
        return shared
    first = min(failed, key=_order)
    error = _explain_first(first)
    early = [end for end in ends if not end.is_failure and not end.stopped]
    if early and first.failure is not None and first.failure.is_echo:
        gone = min(early, key=lambda end: end.time_seconds)
        error.value = f"rank {gone.rank} (pid {gone.pid}) ended early, with code {gone.exit_code}; then {error.value}"
        error.remedy = "Look for what ends the process inside the job, such as sys.exit or os._exit."
    if first.failure is not None:
        error.add_note(f"On rank {first.rank}:\n{first.failure.traceback.rstrip()}")
    return error


def _where(error: BaseException) -> str:
    package = str(Path(errors.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith((package, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _order(end: WorkerEnd) -> tuple[bool, float]:
    if end.failure is not None:
        return end.failure.is_echo, end.failure.time_seconds
    # abort() is how libraries end a process whose peer is gone.
    return end.exit_code == -signal.SIGABRT, end.time_seconds


def _explain_first(end: WorkerEnd) -> WorkerError:
    who, failure = f"rank {end.rank} (pid {end.pid})", end.failure
    if failure is not None and failure.is_ours:
        return WorkerError(f"{who} failed: {failure.type}: {failure.value}", failure.rule, failure.remedy)
    if failure is not None:
        text = failure.text or "no message"
        where = f"It happened at {failure.where}. " if failure.where else ""
        return WorkerError(f"{who} failed: {failure.type}: {text}", _RULE, f"{where}--traceback shows it all.")
    if end.exit_code < 0:
        number = signal.Signals(-end.exit_code)
        remedy = _SIGNAL_REMEDIES.get(number, "Compiled code crashed: update or leave out the library last loaded.")
        return WorkerError(f"{who} was killed by {number.name}.", _RULE, remedy)
    remedy = "It left no reason; see what it printed above, and look for sys.exit or os._exit in the job."
    return WorkerError(f"{who} exited with code {end.exit_code}.", _RULE, remedy)


def _shared_error(ends: Sequence[WorkerEnd]) -> TrimaranError | None:
    failures = [end.failure for end in ends]
    first = failures[0]
    if first is None or not first.is_ours:
        return None
    if any(failure is None or _sentences(failure) != _sentences(first) for failure in failures):
        return None
    kind = getattr(errors, first.type, TrimaranError)
    error: TrimaranError = kind(first.value, first.rule, first.remedy)
    error.exit_code = first.exit_code
    error.add_note(first.traceback.rstrip())
    return error


def _sentences(failure: Failure) -> tuple[str, str, str, str]:
    return failure.type, failure.value, failure.rule, failure.remedy


def _explain_disagreement(ends: Sequence[WorkerEnd]) -> TrimaranError | None:
    if any(end.stopped for end in ends) or len({end.exit_code for end in ends}) == 1:
        return None
    listed = ", ".join(f"rank {end.rank} with {end.exit_code}" for end in ends)
    return WorkerError(
        f"The workers ended differently: {listed}.",
        "All workers finish a run (0), or all of them stop after saving (75).",
        "Start it again.",
    )
