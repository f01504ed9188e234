"""A few optimizer steps with their figures, ended by steps, by seconds, or by what the losses show."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from trimaran.batch import RankBatch
from trimaran.engine import Engine

_STEPS_WATCHED = 5
"""Gradients are looked at in so many first steps: the first gradient of LoRA's A is zero, since B starts at zero."""


@dataclass
class Training:
    """What some steps gave. `silent`: trained parameters whose gradient was exactly zero in every step watched;
    `not_finite`: those whose first gradient was not finite. `out_of_time`: the seconds ended it, not the steps."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    out_of_time: bool = False

    @property
    def diverged(self) -> bool:
        """Whether the last loss is no number; nothing is trained after it."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])


def train(
    engine: Engine,
    batches: Iterable[RankBatch],
    *,
    seconds: float,
    least_steps: int = 1,
    enough: Callable[[Sequence[float]], bool] = lambda losses: False,
) -> Training:
    """Steps on each batch in turn until one of the ends; `seconds` count from the second of `least_steps` on."""
    training = Training(silent=[name for name, each in engine.model.named_parameters() if each.requires_grad])
    began = time.monotonic()
    for batch in batches:
        step_began = time.monotonic()
        engine.accumulate(batch)
        if len(training.losses) < _STEPS_WATCHED:
            _watch_gradients(engine, training)
        training.losses.append(engine.update().loss)
        now = time.monotonic()
        training.seconds.append(now - step_began)
        if training.diverged or (len(training.losses) >= _STEPS_WATCHED and enough(training.losses)):
            break
        if len(training.losses) >= least_steps and now - began > seconds:
            training.out_of_time = True
            break
    return training


def _watch_gradients(engine: Engine, training: Training) -> None:
    gradients = {name: each.grad for name, each in engine.model.named_parameters() if each.grad is not None}
    if not training.losses:
        training.not_finite = [name for name, each in gradients.items() if not torch.isfinite(each).all()]
    training.silent = [name for name in training.silent if name not in gradients or not gradients[name].any()]
