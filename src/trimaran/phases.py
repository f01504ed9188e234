"""The phases of a step, and the one object that times them and lets others watch them. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["data", "forward", "backward", "synchronize", "update", "evaluate", "record"]
PHASES: tuple[Phase, ...] = get_args(Phase)

Observer = Callable[[Phase], None]
"""Called at the start of each phase, on the rank that runs it: a watchdog's beat, or a drill."""


class Phases:
    """Times what runs inside `with phases("forward"):`, in host seconds, and tells the observers first.

    Phases do not nest; on a GPU the host's time of an asynchronous phase is that of queueing its work.
    """

    def __init__(self, *, observers: Sequence[Observer] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self._observers = tuple(observers)
        self._clock = clock
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        for observe in self._observers:
            observe(phase)
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] += self._clock() - began

    def take(self) -> dict[Phase, float]:
        """Seconds per phase since the last call; starts anew."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return taken
