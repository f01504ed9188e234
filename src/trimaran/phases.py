"""The phases of a step and the write points of a save, and the one object that times them and lets others watch.

No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal["data", "forward", "backward", "synchronize", "update", "evaluate", "record", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)

WritePoint = Literal[
    "save:before-directory",
    "save:mid-shard",
    "save:before-flush",
    "save:before-manifest",
    "save:after-manifest",
    "save:before-rename",
    "save:after-rename",
    "save:during-deletion",
]
"""The moments of a save, in order. All ranks pass the first four; rank 0 alone writes the manifest and commits."""
WRITE_POINTS: tuple[WritePoint, ...] = get_args(WritePoint)
COMMIT_POINTS: tuple[WritePoint, ...] = WRITE_POINTS[WRITE_POINTS.index("save:after-manifest") :]
"""Those of rank 0 alone. A rank is before the manifest when its own shards are on disk and rank 0 is told so next."""


@dataclass(frozen=True)
class Moment:
    """A phase about to start, or a write point reached. `step` counts from 1; `path` is what is being written."""

    point: Phase | WritePoint
    step: int
    path: Path | None = None


Observer = Callable[[Moment], None]
"""Called at the start of each phase and at each write point, on the rank that gets there: a watchdog, or a drill."""


class Phases:
    """Times what runs inside `with phases("forward"):`, in host seconds, and tells the observers first.

    Phases do not nest; on a GPU the host's time of an asynchronous phase is that of queueing its work. `step` is the
    number of the step in progress, which the run sets.
    """

    def __init__(self, *, observers: Sequence[Observer] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self.step = 0
        self._observers = tuple(observers)
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        for observe in self._observers:
            observe(Moment(phase, self.step))
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] += self._clock() - began

    def reach(self, point: WritePoint, *, step: int, path: Path) -> None:
        """Tells the observers that the save of `step` got to `point`. Any thread may call it."""
        for observe in self._observers:
            observe(Moment(point, step, path))

    def take(self) -> dict[Phase, float]:
        """Seconds per phase since the last call; starts anew."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken
