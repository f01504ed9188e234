"""What all ranks agree on under a step: the next batch's weight, and whether to go on.

Signals and requests are only recorded where they arrive. One sum over the ranks, asynchronous under the step before,
makes of them the same decision everywhere, taken at the step's edge.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.world.groups import World


class StopRequest:
    """Whether this rank was asked to stop: a flag that signal handlers and callers raise."""

    def __init__(self) -> None:
        self.reason = ""
        self.wants_save = False
        """Set by SIGUSR1: save at the next step's edge, and go on."""
        self.is_saved = False
        """Set when the weights are on disk: there is nothing left to save, and a signal ends what remains at once."""

    def ask(self, reason: str) -> None:
        """Asks every rank to save and leave at the next step's edge; the first reason is kept."""
        self.reason = self.reason or reason


@dataclass(frozen=True)
class Decision:
    """The agreed sums: the next batch's weight and tokens, and whether any rank was asked to stop, or to save."""

    weight: float
    num_tokens: int
    stop: bool
    save: bool = False
    save_failed: bool = False
    """Whether a save failed in the background on any rank."""


class Agreement:
    """A sum over all ranks that has been started; `settle` waits for it."""

    def __init__(
        self,
        world: World,
        *,
        weight: Tensor,
        num_tokens: int,
        stop: bool,
        save: bool = False,
        save_failed: bool = False,
    ) -> None:
        told = [float(each) for each in (weight, num_tokens, stop, save, save_failed)]
        self._values = torch.tensor(told, dtype=torch.float64)
        self._work: dist.Work | None = world.agree_later(self._values)

    def settle(self) -> Decision:
        """The decision, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        weight, num_tokens, stops, saves, failures = self._values.tolist()
        return Decision(weight, int(num_tokens), stops > 0, saves > 0, failures > 0)


@contextmanager
def stop_on_signals(request: StopRequest) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM asks to save and leave, and a second SIGINT ends the process at once.

    SIGUSR1 asks to save and go on.

    Does nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            request.wants_save = True
            return
        if request.is_saved:
            raise KeyboardInterrupt
        if number == signal.SIGINT and request.reason:
            os._exit(130)
        request.ask(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
