"""Which checkpoints are kept: the newest, every M-th, the best. Decided by steps and figures, never by a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.checkpoint.disk import discard, discard_leftovers
from trimaran.checkpoint.finding import Checkpoint, Lineage, checkpoint_folder, list_steps, read_checkpoint
from trimaran.errors import CheckpointError
from trimaran.records import CHECKPOINTS_FOLDER

_ALWAYS_READ = 2


@dataclass(frozen=True)
class Retention:
    """What to keep. `last` None keeps all; `every` is in steps; `best` is (figure, which side is better)."""

    last: int | None = 2
    every: int | None = None
    best: tuple[str, Literal["min", "max"]] | None = None

    def to_delete(self, figures: Mapping[int, float | None]) -> list[int]:
        """Which steps go, oldest first, of a run's valid checkpoints with their values of `best`; never the newest."""
        if self.last is None:
            return []
        newest_first = sorted(figures, reverse=True)
        kept = set(newest_first[: max(1, self.last)])
        if self.every:
            kept |= {step for step in figures if step % self.every == 0}
        if (best := self.find_best(figures)) is not None:
            kept.add(best)
        return [step for step in reversed(newest_first) if step not in kept]

    def find_best(self, figures: Mapping[int, float | None]) -> int | None:
        """The step with the best value, the earlier of two alike; None where none has one, or none is wanted."""
        valued = {step: value for step, value in figures.items() if value is not None and math.isfinite(value)}
        if self.best is None or not valued:
            return None
        pick = min if self.best[1] == "min" else max
        return pick(sorted(valued), key=lambda step: valued[step])


class Keeper:
    """Deletes the checkpoints of a run that its retention does not keep. Only for the run's owner, after a commit.

    It remembers which were valid, with their figures: a save then reads the newest, the best and those that go, and
    not hundreds that stay. Directories that are no valid checkpoints of the run count for nothing, and stay.
    """

    def __init__(
        self, run: Path, lineage: Lineage, retention: Retention, *, epoch: int, confirm: Callable[[], None]
    ) -> None:
        self._run = run
        self._lineage = lineage
        self._retention = retention
        self._epoch = epoch
        self._confirm = confirm
        self._figures: dict[int, float | None] = {}

    def delete_old(self, during: Callable[[Path], None] = lambda folder: None) -> list[int]:
        """Deletes what is not kept; returns its steps. `during` is called in the middle of each deletion.

        `confirm` is called first and before each, and raises where the run has another owner by now.
        """
        self._confirm()  # what looks left over may be what the new owner writes
        discard_leftovers(self._run / CHECKPOINTS_FOLDER)
        if self._retention.last is None:
            return []
        steps = list_steps(self._run)
        self._figures = {step: value for step, value in self._figures.items() if step in steps}
        num_read = 0
        for step in steps:
            # Whether the newest count is never a memory.
            if num_read < _ALWAYS_READ or step not in self._figures:
                num_read += self._look(step)
        while (best := self._retention.find_best(self._figures)) is not None and not self._look(best):
            continue
        deleted = []
        for step in self._retention.to_delete(self._figures):
            if self._look(step):
                self._confirm()
                folder = checkpoint_folder(self._run, step)
                discard(folder, epoch=self._epoch, halfway=lambda folder=folder: during(folder))  # type: ignore[misc]
                deleted.append(step)
        return deleted

    def _look(self, step: int) -> bool:
        """Reads a checkpoint's manifest, and remembers its figure, or nothing of what does not count."""
        self._figures.pop(step, None)
        try:
            found = read_checkpoint(checkpoint_folder(self._run, step), self._lineage)
        except CheckpointError:
            return False
        self._figures[step] = self._figure(found)
        return True

    def _figure(self, checkpoint: Checkpoint) -> float | None:
        validation = checkpoint.state.validation
        return None if self._retention.best is None or validation is None else validation.get(self._retention.best[0])
