"""Loops that stop between two steps: each runs a few steps when it is its turn, all in one thread of one process.

A loop is written as its tool wants it and calls `pace.next_step()` before each step. It runs in a greenlet, a stack of
its own in the same thread, since the Lightning Trainer keeps its loop to itself. So all have the same threads, the
same edges of what is timed, and one life from set-up to end: none begins anew for a block.
"""

from __future__ import annotations

from collections.abc import Callable

from greenlet import greenlet


class Pace:
    """Lets a loop make so many steps at a time, and reads its losses one step late."""

    def __init__(self, loop: Callable[[Pace], None]) -> None:
        self._scheduler = greenlet.getcurrent()
        self._loop = greenlet(loop)
        self._started = False
        self._steps_left = 0
        self._read_previous: Callable[[], float] | None = None
        self.losses: list[float] = []

    def run_steps(self, num_steps: int) -> None:
        """Returns when the loop has made so many more steps; the first time, it is set up before."""
        self._steps_left = num_steps
        # What `switch` is given the first time are the arguments of the loop.
        arguments = () if self._started else (self,)
        self._started = True
        self._loop.switch(*arguments)
        if self._loop.dead:
            raise RuntimeError("a loop ended by itself, though it was to go on for as long as it is asked to")

    def next_step(self) -> None:
        """Called by the loop before each step: waits here for its next turn where this one is over."""
        if self._steps_left == 0:
            self._scheduler.switch()
        self._steps_left -= 1

    def report(self, read: Callable[[], float]) -> None:
        """Called by the loop after each step: reads the loss of the step before, and a step later `read`s this."""
        if self._read_previous is not None:
            self.losses.append(self._read_previous())
        self._read_previous = read
