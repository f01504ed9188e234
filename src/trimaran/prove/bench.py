"""The workbench of a check: the job on one device, with small pieces of its own data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from trimaran.batch import RankBatch
from trimaran.checkpoint import load_weights
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.data.collate import choose_collate
from trimaran.engine import Engine, build_engine
from trimaran.job import Job, Source
from trimaran.layout import Layout, ResolvedLayout
from trimaran.options import Device
from trimaran.world.device import set_numerics
from trimaran.world.groups import World, open_world

SUBSET_BATCHES = 4


@dataclass(frozen=True)
class Limits:
    """What checks may cost: each ends at its steps or its seconds, whichever comes first.

    After `total_seconds` no further check begins; those that are cut short say so and do not fail for it.
    """

    micro_batch: int = 8
    overfit_steps: int = 200
    subset_batch: int = 32
    subset_steps: int = 40
    training_seconds: float = 30.0
    loading_seconds: float = 5.0
    total_seconds: float = 150.0


@dataclass(frozen=True)
class Bench:
    """What all checks share. `layout` is one device's, with micro-batches of at most `limits.micro_batch`."""

    job: Job
    world: World
    layout: ResolvedLayout
    num_workers: int
    limits: Limits
    began: float = field(default_factory=time.monotonic)

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self.began > self.limits.total_seconds

    def build_engine(self, job: Job | None = None, load: Callable[[nn.Module], object] | None = None) -> Engine:
        """A fresh engine of the job, or of a variant of it; with the job's own first weights, or those `load` loads."""
        job = job or self.job
        own = None if job.weights_in is None else partial(load_weights, weights=job.weights_in)
        return build_engine(job, self.layout, self.world, load_weights=load or own)

    def at_rate(self, *, global_batch: int, share: float = 1.0, warmup_steps: int = 5) -> Job:
        """The job at its schedule's highest rate, times `share`, from a short linear warm-up on."""
        return replace(self.job, global_batch=global_batch, schedule=_Steady(share * _peak(self.job), warmup_steps))

    def first_batch(self) -> RankBatch:
        """One micro-batch: the run's first samples."""
        size = min(self.layout.micro_batch, len(self.job.data))
        return next(iter(self.loader(self.job.data, batch=size, steps=1)))

    def evaluation_batch(self) -> RankBatch:
        """One micro-batch of the validation data, or of the training data where there is no other."""
        source = self.job.data if self.job.valid is None else self.job.valid
        size = min(self.layout.micro_batch, len(source))
        return next(iter(self.loader(source, batch=size, steps=1, shuffle=self.job.valid is None)))

    def subset(self) -> Source:
        """The run's first samples, some batches of them: few enough to be seen several times."""
        num_samples = min(len(self.job.data), SUBSET_BATCHES * self.subset_batch)
        ids = Order(len(self.job.data), self.job.seed).at(np.arange(num_samples))[1]
        return Subset(self.job.data, tuple(ids.tolist()))

    @property
    def subset_batch(self) -> int:
        return min(self.job.global_batch, self.limits.subset_batch, len(self.job.data))

    def loader(
        self, source: Source, *, batch: int, steps: int, first_step: int = 0, shuffle: bool = True
    ) -> BatchLoader:
        """`steps` batches of so many samples, loaded in this process as a run loads them."""
        return build_loader(
            source,
            collate=choose_collate(self.job.data if isinstance(source, Subset) else source, self.job.collate),
            order=Order(len(source), self.job.seed, shuffle=shuffle),
            global_batch=batch,
            total_samples=batch * (first_step + steps),
            first_step=first_step,
            dp=1,
            dp_rank=0,
            micro_batch=min(batch, self.layout.micro_batch),
        )


def open_bench(job: Job, *, device: Device, num_workers: int, limits: Limits) -> Bench:
    """The bench on one device, in this process. Raises ClusterError for a device that is not here."""
    layout = Layout(micro_batch=limits.micro_batch).resolve(world_size=1, global_batch=job.global_batch)
    set_numerics(precision=layout.precision, deterministic=False)
    return Bench(job, open_world(None, layout, device=device), layout, num_workers, limits)


@dataclass(frozen=True)
class Subset:
    """Some samples of a source, by their numbers there."""

    source: Source
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.source[self.ids[index]]


@dataclass(frozen=True)
class _Steady:
    """A schedule: a few steps of warm-up, then `factor` for good."""

    factor: float
    warmup_steps: int

    def resolve(self, *, total_steps: int, steps_per_epoch: float) -> Callable[[int], float]:
        return lambda update: self.factor * min(1.0, (update + 1) / self.warmup_steps)

    def describe(self, *, total_steps: int, steps_per_epoch: float) -> str:
        return f"{self.factor:g}, {self.warmup_steps} warm-up steps"


def _peak(job: Job) -> float:
    """The highest factor of the job's schedule, looked for at a hundred of its steps."""
    factor = job.schedule.resolve(total_steps=job.total_steps, steps_per_epoch=job.steps_per_epoch)
    return max(factor(step * (job.total_steps - 1) // 99) for step in range(100))
