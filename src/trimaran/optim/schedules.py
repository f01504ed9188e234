"""Learning-rate schedules: a factor for each update, multiplied into every group's rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimaran.errors import OptimizerError, UsageError
from trimaran.job import Schedule
from trimaran.optim.checks import is_count, is_number
from trimaran.units import Duration, format_number, parse_duration

# Update i, counted from 0, of a run of n updates with w of warm-up. Up: (i + 1) / w, so that the first update already
# moves the weights and update w - 1 has the full rate. Down, over d updates from update s: the shape at (i - s) / d,
# so that update s has the full rate still and the final factor is reached at update n, the first one after the run:
# with a final factor of 0 no update is wasted. Beyond the run the factor stays final.
Factor = Callable[[int], float]
Shape = Literal["linear", "cosine", "sqrt"]
Span = str | float  # "100steps", "1epoch", or a fraction of the run such as 0.05


def constant(warmup: Span = 0) -> Schedule:
    """The rate stays as it is, after a warm-up."""
    return WarmupThenDecay("constant", warmup, decay=0, final=1.0, shape="linear")


def linear(warmup: Span = 0, final: float = 0.0) -> Schedule:
    """After a warm-up the rate falls in a straight line to `final` times itself at the run's end."""
    return WarmupThenDecay("linear", warmup, decay=None, final=final, shape="linear")


def cosine(warmup: Span = 0, final: float = 0.1) -> Schedule:
    """After a warm-up the rate falls along half a cosine to `final` times itself at the run's end.

    Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts.
    """
    return WarmupThenDecay("cosine", warmup, decay=None, final=final, shape="cosine")


def warmup_stable_decay(
    warmup: Span, decay: Span = 0.2, final: float = 0.0, shape: Literal["linear", "sqrt"] = "linear"
) -> Schedule:
    """A warm-up, the full rate, and over the last `decay` of the run a fall to `final` times the rate.

    shape: "linear", or "sqrt", which is 1 - √progress, steep at first (Hägele et al. 2024, arXiv 2405.18392).
    """
    if shape not in ("linear", "sqrt"):
        raise OptimizerError(
            f"warmup_stable_decay(shape={shape!r}).",
            'The rate falls in a straight line ("linear") or as 1 - √progress ("sqrt").',
            'Give "linear" or "sqrt".',
        )
    return WarmupThenDecay("warmup_stable_decay", warmup, decay=decay, final=final, shape=shape)


@dataclass(frozen=True)
class WarmupThenDecay:
    """What every schedule here is: up, level, and down to `final` over `decay` (None: all that the warm-up leaves).

    Raises OptimizerError for values that cannot be meant, and on resolving where the spans are longer than the run.
    """

    name: str
    warmup: Span
    decay: Span | None
    final: float
    shape: Shape

    def __post_init__(self) -> None:
        self._span("warmup", self.warmup)
        self._span("decay", self.decay or 0)
        if not is_number(self.final) or not 0 <= self.final <= 1:
            raise OptimizerError(
                f"{self.name}(final={self.final!r}).",
                "It is the share of the rate that is left at the end, from 0 to 1.",
                "Give, for example, final=0.1.",
            )

    def resolve(self, *, total_steps: int, steps_per_epoch: float) -> Factor:
        """`factor(update)`, with updates counted from 0."""
        warmup_steps, decay_steps = self._steps(total_steps, steps_per_epoch)
        decay_start = total_steps - decay_steps

        def factor(update: int) -> float:
            if update < warmup_steps:
                return (update + 1) / warmup_steps
            if update < decay_start or decay_steps == 0:
                return 1.0
            progress = min(1.0, (update - decay_start) / decay_steps)
            return self.final + (1.0 - self.final) * _SHAPES[self.shape](progress)

        return factor

    def describe(self, *, total_steps: int, steps_per_epoch: float) -> str:
        """A line such as "cosine to 0.1, 50 warm-up steps"."""
        warmup_steps, decay_steps = self._steps(total_steps, steps_per_epoch)
        text = self.name if self.decay == 0 else f"{self.shape} to {format_number(self.final)}"
        if self.decay not in (0, None):
            text = f"stable, then {text} over the last {_count(decay_steps, 'step')}"
        asked = any(vars(self._span("warmup", self.warmup)).values())  # a fraction that rounds to 0 steps is said
        return f"{text}, {_count(warmup_steps, 'warm-up step')}" if asked else text

    def _steps(self, total_steps: int, steps_per_epoch: float) -> tuple[int, int]:
        if not is_count(total_steps):
            raise OptimizerError(
                f"A run of {total_steps!r} steps.", "Steps are counted from 1.", "Give at least one step."
            )
        warmup, decay = self._span("warmup", self.warmup), self._span("decay", self.decay or 0)
        warmup_steps = warmup.in_steps(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        decay_steps = decay.in_steps(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        if warmup.fraction is not None and decay.fraction is not None and warmup.fraction + decay.fraction <= 1:
            decay_steps = min(decay_steps, total_steps - warmup_steps)  # two halves of 7 steps are 4 and 3
        if warmup_steps + decay_steps > total_steps:
            falling = f" and a decay of {_count(decay_steps, 'step')}" if decay_steps else ""
            raise OptimizerError(
                f"{self.name} has a warm-up of {_count(warmup_steps, 'step')}{falling}, "
                f"in a run of {_count(total_steps, 'step')}.",
                "A schedule fits into its run.",
                "Train for longer, or write shorter spans: a fraction such as 0.05 follows the run's length.",
            )
        return warmup_steps, total_steps - warmup_steps if self.decay is None else decay_steps

    def _span(self, option: str, value: Span) -> Duration:
        try:
            span = parse_duration(value)
            if span.seconds is not None:
                span.in_steps(total_steps=1, steps_per_epoch=1.0)  # says why wall time cannot be
        except UsageError as error:
            raise OptimizerError(f"{self.name}({option}={value!r}): {error.value}", error.rule, error.remedy) from None
        return span


# The share of the fall that is left at each point of the decay, from progress 0 to 1.
_SHAPES: dict[Shape, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
