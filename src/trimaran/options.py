"""How a run is looked after: `RunOptions`. No torch at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trimaran.errors import UsageError
from trimaran.units import Duration, parse_duration

Device = Literal["auto", "cpu", "cuda", "mps"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is looked after; none of it changes what is learnt. Raises UsageError for a wrong value."""

    evaluate_every: str | None = None
    """Evaluate on the validation data this often, as "200steps" or "1epoch"; always at the end."""
    log_every: int = 10
    """Print a line every so many steps where the output is not a terminal."""
    device: Device = "auto"
    """auto takes cuda, else the CPU; mps is taken only when named."""
    deterministic: bool = False
    """Only algorithms that give the same bits each time; slower on GPUs, no difference on CPUs."""
    num_workers: int = 0
    """Processes that load data, for each rank; 0 loads in the training process."""
    track: tuple[Tracker, ...] = ()
    """Experiment trackers that receive each step's figures; each is an extra, and configured as it documents."""

    def __post_init__(self) -> None:
        if self.device not in get_args(Device):
            raise UsageError(
                f"device={self.device!r} is unknown.", f"Known: {', '.join(get_args(Device))}.", 'Use "auto".'
            )
        if self.num_workers < 0:
            raise UsageError(f"num_workers={self.num_workers}.", "It counts processes.", "Give 0 or more.")
        if isinstance(self.track, str):
            raise UsageError(
                f"track={self.track!r} is a string.", "It lists trackers.", f"Write track=({self.track!r},)."
            )
        for name in self.track:
            if name not in get_args(Tracker):
                raise UsageError(
                    f"track={name!r} is unknown.", f"Known: {', '.join(get_args(Tracker))}.", "Give one of them."
                )
        if self.log_every < 1:
            raise UsageError(f"log_every={self.log_every}.", "It counts steps.", "Give 1 or more.")
        every = self.evaluation_interval
        if every is not None and every.seconds is not None:
            raise UsageError(
                f"evaluate_every={self.evaluate_every!r} is wall time.",
                "When a run evaluates is part of its records, which a rerun repeats.",
                'Give steps or epochs, such as "200steps".',
            )

    @property
    def evaluation_interval(self) -> Duration | None:
        """`evaluate_every`, parsed."""
        return None if self.evaluate_every is None else parse_duration(self.evaluate_every)
