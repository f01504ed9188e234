"""How a run is looked after: `RunOptions`. No torch at import."""

from __future__ import annotations

import re
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
    save_every: str = "10min"
    """Save a checkpoint this often: "10min", "200steps", both as "10min 200steps", or "never"; always at the end."""
    keep_last: int | Literal["all"] = 2
    """Keep so many of the newest checkpoints, and delete older ones."""
    keep_every: str | None = None
    """Save at every multiple of this too, as "1000steps" or "1epoch", and keep these checkpoints for good."""
    keep_best: str | None = None
    """Save after each best evaluation, and keep that checkpoint: "loss", or a metric as "accuracy:max"."""
    audit_every: int | None = None
    """Every so many steps compare what ranks hold in common, bit for bit; a difference ends the run and is named."""
    drill: tuple[str, ...] = ()
    """Rehearse a fault, as "kill rank=1 step=7 phase=save:before-manifest"; each fires once in a run."""

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
        if isinstance(self.drill, str):
            raise UsageError(
                f"drill={self.drill!r} is a string.", "It lists drills.", f"Write drill=({self.drill!r},)."
            )
        self._check_saving()
        if self.log_every < 1:
            raise UsageError(f"log_every={self.log_every}.", "It counts steps.", "Give 1 or more.")
        if self.audit_every is not None and self.audit_every < 1:
            raise UsageError(f"audit_every={self.audit_every}.", "It counts steps.", "Give 1 or more, or leave it out.")
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

    @property
    def save_intervals(self) -> tuple[Duration, ...]:
        """`save_every`, parsed: wall time, steps or epochs, or both; empty for never."""
        if self.save_every.strip() == "never":
            return ()
        try:
            return tuple(parse_duration(each) for each in re.split(r"[\s,+]+(?=[0-9.])", self.save_every.strip()))
        except UsageError as problem:
            raise UsageError(
                f"save_every={self.save_every!r}: {problem.value}",
                problem.rule,
                'Write, for example, "10min", "200steps", "10min 200steps" or "never".',
            ) from None

    @property
    def kept_interval(self) -> Duration | None:
        """`keep_every`, parsed."""
        return None if self.keep_every is None else parse_duration(self.keep_every)

    @property
    def best_figure(self) -> tuple[str, Literal["min", "max"]] | None:
        """`keep_best` as (name of the figure, whether the smallest or the largest is best)."""
        if self.keep_best is None:
            return None
        name, colon, side = self.keep_best.partition(":")
        if not name or (side not in ("min", "max") if colon else name != "loss"):
            raise UsageError(
                f"keep_best={self.keep_best!r}.",
                "A loss is best where it is least; of a metric only you know.",
                'Write "loss", or the metric with its better side, as "accuracy:max" or "perplexity:min".',
            )
        return name, "max" if side == "max" else "min"

    def _check_saving(self) -> None:
        intervals = self.save_intervals
        kinds = ["wall time" if each.seconds is not None else "steps" for each in intervals]
        if len(kinds) != len(set(kinds)) or any(each.fraction is not None for each in intervals):
            raise UsageError(
                f"save_every={self.save_every!r}.",
                "A run saves by wall time, by steps, or by one of each.",
                'Write, for example, "10min", "200steps" or "10min 200steps".',
            )
        if any(each.seconds == 0 or each.steps == 0 or each.epochs == 0 for each in intervals):
            raise UsageError(
                f"save_every={self.save_every!r} is no time at all.",
                "It is a span.",
                'Give "never" to save at the end only.',
            )
        if self.keep_last != "all" and (type(self.keep_last) is not int or self.keep_last < 1):
            raise UsageError(
                f"keep_last={self.keep_last!r}.",
                "The newest checkpoint is never deleted: the run continues from it.",
                'Give 1 or more, or "all".',
            )
        kept = self.kept_interval
        if kept is not None and (
            kept.seconds is not None or kept.fraction is not None or 0 in (kept.steps, kept.epochs)
        ):
            raise UsageError(
                f"keep_every={self.keep_every!r}.",
                "Which checkpoints are kept for good goes by their steps.",
                'Give steps or epochs, such as "1000steps".',
            )
        _ = self.best_figure
