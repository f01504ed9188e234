"""Which checkpoints are kept: the newest, every M-th, the best. Decided by steps and figures, never by a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimaran.checkpoint.finding import Checkpoint, Lineage, iterate_valid
from trimaran.checkpoint.saving import discard


@dataclass(frozen=True)
class Retention:
    """What to keep. `last` None keeps all; `every` is in steps; `best` is (figure, which side is better)."""

    last: int | None = 2
    every: int | None = None
    best: tuple[str, Literal["min", "max"]] | None = None

    def to_delete(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those of a run's valid checkpoints that go, oldest first; the newest never does."""
        newest_first = sorted(checkpoints, key=lambda each: each.step, reverse=True)
        if self.last is None:
            return []
        kept = {each.step for each in newest_first[: max(1, self.last)]}
        if self.every:
            kept |= {each.step for each in newest_first if each.step % self.every == 0}
        if self.best is not None and (best := find_best(newest_first, *self.best)) is not None:
            kept.add(best.step)
        return [each for each in reversed(newest_first) if each.step not in kept]


def find_best(checkpoints: Sequence[Checkpoint], figure: str, side: Literal["min", "max"]) -> Checkpoint | None:
    """The checkpoint with the best value of a validation figure, the earlier of two alike; None where none has it."""
    valued = [
        (float(each.state.validation[figure]), each)
        for each in sorted(checkpoints, key=lambda each: each.step)
        if each.state.validation is not None and figure in each.state.validation
    ]
    finite = [pair for pair in valued if math.isfinite(pair[0])]
    if not finite:
        return None
    pick = min if side == "min" else max
    return pick(finite, key=lambda pair: pair[0])[1]


def delete_old(
    run: Path, lineage: Lineage, retention: Retention, *, epoch: int, during: Callable[[Checkpoint], None]
) -> list[int]:
    """Deletes what `retention` does not keep; returns its steps. Only for the run's owner, after a commit.

    Directories that are no valid checkpoints of the run count for nothing, and stay. `during` is called in the
    middle of each deletion.
    """
    doomed = retention.to_delete(list(iterate_valid(run, lineage)))
    for each in doomed:
        discard(each.folder, epoch=epoch, halfway=lambda each=each: during(each))  # type: ignore[misc]
    return [each.step for each in doomed]
