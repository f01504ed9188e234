"""A run's directory: one living writer (invariant 11), and refusal of another job's.

The writer holds an advisory lock on `lock`, which the system frees when it dies, and has an epoch number, written to
`owner.json` and one higher with each owner. Every write first checks the number: an owner that lost the directory
without noticing (a suspended process, a file system whose locks are lost) is refused when it writes again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from trimaran.errors import RunError
from trimaran.records import (
    EVENTS_FILE,
    METRICS_FILE,
    OWNER_FILE,
    RUN_FILE,
    TIMING_FILE,
    EventRecord,
    OwnerRecord,
    RunRecord,
    StepRecord,
    TimingRecord,
    cut_back,
    drop_torn_line,
    read_owner,
    read_run,
    to_line,
    write_owner,
    write_run,
)
from trimaran.run.drills import DRILLS_FOLDER

try:
    import fcntl
except ImportError:  # Windows has no flock; WSL does
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "lock"
_OF_TRACKERS = ("tensorboard", "wandb")
"""Folders that trackers make in a run's directory, perhaps before the run is recorded."""
_FILES = {StepRecord: METRICS_FILE, TimingRecord: TIMING_FILE, EventRecord: EVENTS_FILE}


def name_run(job_name: str) -> Path:
    """A new directory's name: runs/<job>-<date>-<time>-<six hex digits>, so that many starts in one second differ."""
    return Path("runs") / f"{job_name or 'run'}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


class RunDirectory:
    """The records of one run, opened by its only writer. `open` takes the lock; `close` gives it back."""

    def __init__(self, path: Path, lock: IO[str], epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self._lock = lock
        self._files: dict[type, IO[str]] = {}

    @classmethod
    def open(cls, path: Path, *, wait_seconds: float = 5.0) -> RunDirectory:
        """Makes the directory where it is missing, waits for its lock, and takes it over.

        Raises RunError where somebody else still holds it after `wait_seconds`, or it holds something that is no run.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            _refuse_foreign(path)
            lock = (path / LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as problem:
            raise RunError(
                f"{path} cannot be written: {problem.strerror or problem}.",
                "A run keeps its records in a directory of its own.",
                "Choose another --run.",
            ) from problem
        try:
            _wait_for_lock(lock, path, wait_seconds)
            epoch = read_owner(path).epoch + 1
            write_owner(path, OwnerRecord(epoch, os.getpid(), socket.gethostname(), read_owner(path).resumed))
        except BaseException:
            lock.close()
            raise
        return cls(path, lock, epoch)

    def read_started(self, identity: Mapping[str, Any], name: str = "") -> RunRecord | None:
        """The record of the run that was started here; None where none was.

        Raises RunError where it was another job's, naming what differs from `identity`, and the job's name.
        """
        if not (self.path / RUN_FILE).exists():
            return None
        there = read_run(self.path / RUN_FILE)
        difference = find_difference(there.identity, identity)
        if difference is not None:
            key, theirs, ours = difference
            key = key.removeprefix("arguments.")
            jobs = f" It is a run of {there.name}, and this is {name}." if name and name != there.name else ""
            raise RunError(
                f"{self.path} was started with {key}={theirs}; this command has {key}={ours}.{jobs}",
                "A run keeps its job.",
                f"Start a new one (another --run), give the arguments it was started with, or continue it changed, in "
                f"another directory: --fork {self.path}.",
            )
        return there

    def take_over(self, step: int) -> int:
        """Makes `step` the run's present: what an earlier owner recorded or may still save beyond it counts no more.

        Returns how many steps the metrics hold.
        """
        self._check_owner()
        owner = read_owner(self.path)
        write_owner(self.path, replace(owner, resumed={**owner.resumed, self.epoch: step}))
        drop_torn_line(self.path / EVENTS_FILE)
        cut_back(self.path / TIMING_FILE, step)
        return cut_back(self.path / METRICS_FILE, step)

    def confirm(self) -> None:
        """Flushes the records to disk. Any thread may call it.

        Raises RunError where this owner was replaced, or where the records were removed under it.
        """
        self._check_owner()
        for kind, file in list(self._files.items()):
            os.fsync(file.fileno())
            self._check_there(self.path / _FILES[kind], os.fstat(file.fileno()))
        self._check_there(self.path / RUN_FILE)

    def write_run(self, record: RunRecord) -> None:
        """Writes run.json; from here on the directory belongs to this job."""
        self._check_owner()
        write_run(self.path / RUN_FILE, record)

    def append(self, record: StepRecord | TimingRecord | EventRecord) -> None:
        """Adds one line to the record's file, complete and flushed."""
        self._check_owner()
        kind = type(record)
        try:
            if kind not in self._files:
                self._files[kind] = (self.path / _FILES[kind]).open("a", encoding="utf-8")
            file = self._files[kind]
            file.write(to_line(record) + "\n")
            file.flush()
        except OSError as problem:
            raise RunError(
                f"{self.path / _FILES[kind]} cannot be written: {problem.strerror or problem}.",
                "A run records every step.",
                "Make room on that disk, or choose another --run.",
            ) from problem

    def note(self, event: str, step: int, detail: str = "") -> None:
        """Adds an event, with the time."""
        self.append(EventRecord(datetime.now(UTC).isoformat(timespec="milliseconds"), event, step, detail))

    def owned_path(self, name: str) -> Path:
        """The path of a file in the directory that its owner is about to write."""
        self._check_owner()
        return self.path / name

    def close(self) -> None:
        """Flushes the records to disk and gives the directory back."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # close writes what an earlier write could not
                os.fsync(file.fileno())
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
        self._lock.close()

    def discard_unused(self) -> None:
        """Removes a closed directory in which no run was recorded; only for a name that nobody else can know."""
        if (self.path / RUN_FILE).exists():
            return
        for name in (LOCK_FILE, OWNER_FILE):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _check_there(self, path: Path, about: os.stat_result | None = None) -> None:
        try:
            found = path.stat()
        except FileNotFoundError:
            found = None
        if found is None or (about is not None and not os.path.samestat(found, about)):
            raise RunError(
                f"{path} was removed or replaced while this process was writing to it.",
                "A run keeps its records in its directory.",
                "Leave a running run's directory alone. Start again: the run continues from its last checkpoint.",
            )

    def _check_owner(self) -> None:
        epoch = read_owner(self.path).epoch
        if epoch == 0:
            raise RunError(
                f"{self.path} was removed or emptied while this process was writing to it.",
                "A run keeps its records in its directory.",
                "Leave a running run's directory alone, and start again.",
            )
        if epoch != self.epoch:
            raise RunError(
                f"{self.path} was taken over by another start (owner {epoch}; this process is owner {self.epoch}).",
                "A run has one writer.",
                "Let the newer one go on; this one ends here.",
            )


def find_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first entry in which two nested mappings differ, as (dotted name, theirs, ours); None when equal."""
    return next(find_differences(theirs, ours), None)


def find_differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """All entries in which two nested mappings differ, as (dotted name, theirs, ours)."""
    for key in [*theirs, *(key for key in ours if key not in theirs)]:
        left, right = theirs.get(key), ours.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from find_differences(left, right, f"{prefix}{key}.")
        elif left != right:
            yield f"{prefix}{key}", left, right


def _refuse_foreign(path: Path) -> None:
    known = {LOCK_FILE, *(f"{name}.tmp" for name in (OWNER_FILE, RUN_FILE)), OWNER_FILE, DRILLS_FOLDER, *_OF_TRACKERS}
    names = {entry.name for entry in path.iterdir()}
    if RUN_FILE not in names and names - known:
        raise RunError(
            f"{path} is not empty and holds no run: {', '.join(sorted(names - known)[:3])}.",
            "A run has a directory of its own.",
            "Choose another --run.",
        )


def _wait_for_lock(lock: IO[str], path: Path, wait_seconds: float) -> None:
    if fcntl is None:
        return
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"{path} is being written by {read_owner(path)}.",
                    "A run has one writer.",
                    "Wait until it ends, stop it, or choose another --run.",
                ) from None
            time.sleep(0.1)
