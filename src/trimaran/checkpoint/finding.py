"""The checkpoints of a run directory, newest first, and why some of them do not count."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.checkpoint.reading import read_whole_manifest, verify_files
from trimaran.errors import CheckpointError, RunError, UsageError
from trimaran.records import (
    CHECKPOINTS_FOLDER,
    RUN_FILE,
    Manifest,
    StateRecord,
    name_checkpoint,
    read_owner,
    read_run,
)

_NAME = re.compile(r"step-([0-9]{8,12})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest and state were read and whose files have their sizes."""

    folder: Path
    manifest: Manifest
    state: StateRecord

    @property
    def step(self) -> int:
        return self.manifest.step


@dataclass(frozen=True)
class Lineage:
    """Which checkpoints are a run's own: those of its id that no later owner left behind.

    `resumed` has, for each owner that continued the run, the step it went on from. What an earlier owner wrote beyond
    that step is not this run's past: an orphan may go on writing after it was replaced.
    """

    run_id: str
    resumed: Mapping[int, int]

    @classmethod
    def read(cls, run: Path) -> Lineage:
        """That of the run in a directory, which need not be locked. Raises RunError where no run is there."""
        return cls(read_run(run / RUN_FILE).id, read_owner(run).resumed)

    def find_fault(self, manifest: Manifest) -> str | None:
        """Why a checkpoint does not count; None where it does."""
        if manifest.run_id != self.run_id:
            return f"it belongs to another run (id {manifest.run_id})"
        for epoch, step in self.resumed.items():
            if manifest.epoch < epoch and manifest.step > step:
                return f"owner {manifest.epoch} wrote it, and owner {epoch} had gone on from step {step}"
        return None


def split_step(text: str) -> tuple[Path, int | None]:
    """Directory and step of RUN@step, or RUN and None. A directory that has an @ in its own name is found, too.

    Raises UsageError where what follows the @ is no step.
    """
    run, at, step = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not re.fullmatch(r"[0-9]{1,18}", step):
        raise UsageError(
            f"{text!r} names step {step!r}.", "A checkpoint of a run is named RUN@STEP.", f"Write, say, {run}@100."
        )
    return Path(run), int(step)


def find_candidates(run: Path, step: int | None, *, said: str = "") -> tuple[Lineage, list[int]]:
    """A run's lineage, and the steps to choose a checkpoint from: the newest first, or `step` alone.

    `said` begins the message, with what the user wrote. Raises RunError where no run is there, it has no checkpoint,
    or none of that step.
    """
    if not (run / RUN_FILE).is_file():
        raise RunError(
            f"{said}{run} holds no run.",
            "A run is known by its run.json.",
            "Give the directory of a run that has saved, such as runs/a, or runs/a@200 for its step 200.",
        )
    steps = list_steps(run)
    if not steps:
        raise RunError(
            f"{said}{run} has no checkpoints.",
            f"A run saves them in {CHECKPOINTS_FOLDER}/ as it goes; one that ended before its first has none.",
            "Give another run, or run this one again.",
        )
    if step is not None and step not in steps:
        raise RunError(
            f"{said}{run} has no checkpoint of step {step}.",
            f"It has those of steps {', '.join(map(str, reversed(steps)))}.",
            f"Name one of them, such as {run}@{steps[0]}, or none for the newest.",
        )
    return Lineage.read(run), steps if step is None else [step]


def list_steps(run: Path) -> list[int]:
    """The steps of what is named as a checkpoint is, newest first: by their names, not by any clock.

    None where the run has no folder for them. Raises RunError where that is a link, no folder, or unreadable:
    a run whose checkpoints are out of reach has not lost them.
    """
    folder = run / CHECKPOINTS_FOLDER
    try:
        if folder.is_symlink():
            raise _unlisted(folder, "is a link")
        matches = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise _unlisted(folder, f"cannot be read: {problem.strerror}") from problem
    steps = {int(match[1]) for match in matches if match and match.string == name_checkpoint(int(match[1]))}
    return sorted(steps, reverse=True)


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, or would."""
    return run / CHECKPOINTS_FOLDER / name_checkpoint(step)


def read_checkpoint(folder: Path, lineage: Lineage) -> Checkpoint:
    """A checkpoint as far as its manifest goes. Raises CheckpointError where it does not count."""
    manifest, state = read_whole_manifest(folder)
    if folder.name != name_checkpoint(manifest.step):
        raise _refusal(folder, f"holds a checkpoint of step {manifest.step}")
    if (fault := lineage.find_fault(manifest)) is not None:
        raise _refusal(folder, f"is passed over: {fault}")
    return Checkpoint(folder, manifest, state)


def find_checkpoint(
    run: Path,
    lineage: Lineage,
    steps: Sequence[int],
    *,
    share: tuple[int, int] = (0, 1),
    agree: Callable[[str], str] = lambda fault: fault,
) -> tuple[Checkpoint | None, list[str]]:
    """The first of these steps whose checkpoint counts and has the bytes that were written; and why others have not.

    None where there is none. `share` (index, of how many) is the part of the files that this process verifies, and
    `agree` tells it the first fault that any of them found ("" for none): all then find the same. All call it alike.
    """
    refused: list[str] = []
    for step in steps:
        found, fault = None, ""
        try:
            found = read_checkpoint(checkpoint_folder(run, step), lineage)
            verify_files(found.folder, found.manifest, _deal_files(found.manifest, *share))
        except CheckpointError as problem:
            fault = problem.value
        fault = agree(fault)
        if not fault:
            return found, refused
        refused.append(fault)
    return None, refused


def _deal_files(manifest: Manifest, share: int, num_shares: int) -> list[str]:
    """One share of a checkpoint's files, so that all shares have alike many bytes."""
    loads = [0] * num_shares
    mine = []
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name)):
        taker = min(range(num_shares), key=lambda each: (loads[each], each))
        loads[taker] += manifest.files[name].num_bytes
        if taker == share:
            mine.append(name)
    return mine


def _unlisted(folder: Path, what: str) -> RunError:
    return RunError(
        f"{folder} {what}.",
        "A run keeps its checkpoints in a folder of its own directory, and nowhere else.",
        "Give --run the directory that really holds them, or make that folder readable.",
    )


def _refusal(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{folder} {what}.", "A run continues from its own past.", "Use another checkpoint.")
