"""Batches for one rank: its micro-batches of every optimizer step, in the one global order."""

from __future__ import annotations

import math
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from trimaran.batch import MicroBatch, RankBatch
from trimaran.data.collate import Collate, choose_collate
from trimaran.data.fetch import Failure, Fetch
from trimaran.data.order import Order
from trimaran.data.workers import load
from trimaran.job import Source
from trimaran.layout import Slice, deal


def build_loader(
    source: Source,
    *,
    collate: Collate | None,
    order: Order,
    global_batch: int,
    total_samples: int,
    dp: int,
    dp_rank: int,
    micro_batch: int,
    first_step: int = 0,
    shift: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> BatchLoader:
    """This rank's share of every global batch from `first_step` on; needs no other rank.

    Step k covers positions [k · global_batch, (k + 1) · global_batch) of `order`, cut at `total_samples`, all of them
    `shift` later where the steps before had another size. To evaluate: Order(len(source), shuffle=False) and
    total_samples=len(source).
    """
    plan = _Plan(global_batch, total_samples, first_step, shift, dp, dp_rank, micro_batch)
    return BatchLoader(Fetch(source, choose_collate(source, collate), order), plan, num_workers, pin_memory)


@dataclass(frozen=True)
class _Plan:
    """Which micro-batches a rank loads for which step. A run's data state is `first_step`, and `shift` where forked."""

    global_batch: int
    total_samples: int
    first_step: int
    shift: int
    dp: int
    dp_rank: int
    micro_batch: int

    @property
    def steps(self) -> range:
        return range(self.first_step, math.ceil(self.total_samples / self.global_batch))

    def num_samples(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return min(self.global_batch, self.total_samples - step * self.global_batch)

    def slices(self, step: int) -> tuple[Slice, ...]:
        """This rank's micro-batches of a step."""
        start = step * self.global_batch + self.shift
        stop = start + self.num_samples(step)
        return deal(start=start, stop=stop, dp=self.dp, dp_rank=self.dp_rank, micro_batch=self.micro_batch)

    def __iter__(self) -> Iterator[Slice]:
        """All of this rank's micro-batches: what torch's DataLoader takes as its sampler."""
        for step in self.steps:
            yield from self.slices(step)


class BatchLoader:
    """An iterable over one rank's `RankBatch` of each step; iterating again starts again at the first step.

    Randomness that a sample draws from `random`, `numpy.random` or torch's CPU generator depends on (seed, epoch,
    sample id) only; the process's own generators are not touched. A generator object that the source keeps for
    itself cannot be held to that. Raises DataError where a sample, a collate or a worker fails.
    """

    def __init__(self, fetch: Fetch, plan: _Plan, num_workers: int, pin_memory: bool) -> None:
        self._fetch = fetch
        self._plan = plan
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        # Weak, so that an iteration that is abandoned ends its workers.
        self._iterations: weakref.WeakSet[Generator[RankBatch]] = weakref.WeakSet()

    def __len__(self) -> int:
        """Steps from the first one on."""
        return len(self._plan.steps)

    def __iter__(self) -> Iterator[RankBatch]:
        iteration = self._iterate()
        self._iterations.add(iteration)
        return iteration

    def close(self) -> None:
        """End the loader's workers; iterations in progress have no next batch."""
        for iteration in list(self._iterations):
            iteration.close()

    def _iterate(self) -> Generator[RankBatch]:
        loaded = load(self._fetch, self._plan, num_workers=self._num_workers, pin_memory=self._pin_memory)
        with closing(loaded):
            for step in self._plan.steps:
                micro_batches = tuple(_micro_batch(wanted, next(loaded)) for wanted in self._plan.slices(step))
                yield RankBatch(index=step, num_samples=self._plan.num_samples(step), micro_batches=micro_batches)


def _micro_batch(wanted: Slice, loaded: dict[str, Tensor] | Failure) -> MicroBatch:
    if isinstance(loaded, Failure):
        raise loaded.error()
    return MicroBatch(loaded, wanted.start, wanted.stop - wanted.start, wanted.weightless)
