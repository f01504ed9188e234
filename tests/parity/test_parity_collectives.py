"""Collectives of a step: as few as promised, in one order on all ranks, and started under the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_engine import assert_close, buckets_of, join, start
from parity_jobs import Case, build_job
from test_parity_buffers import image_job
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from trimaran.engine import build_engine
from trimaran.layout import Layout
from trimaran.phases import Phases


@contextmanager
def recorded(events: list[str]) -> Iterator[None]:
    """Notes every collective that is started, as its name and number of elements."""
    names = [name for name in ("all_reduce", "broadcast", "all_gather", "reduce", "barrier") if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in names}

    def record(name: str) -> Any:
        def call(tensor: Any = None, *args: Any, **kwargs: Any) -> Any:
            events.append(f"{name} {tensor.numel() if isinstance(tensor, Tensor) else '?'}")
            return originals[name](tensor, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, record(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def collectives_of_a_step(case: Case, batch_norm: bool, bucket_bytes: int) -> tuple[list[str], list[int]]:
    """What the second step starts, and the buckets' sizes; the total weight is known, as it is in a run."""
    job = image_job(case.global_batch, steps=2) if batch_norm else build_job(case)
    with buckets_of(bucket_bytes):
        engine, loader, _ = start(job, precision=case.precision, micro_batch=case.micro_batch)
    first, second = list(loader)[:2]
    engine.step(first)
    second = replace(second, total_weight=engine.agree_on_weight(second))
    events: list[str] = []
    with recorded(events):
        assert not engine.step(second).skipped
    assert engine._replicas is not None
    return events, [bucket.flat.numel() for bucket in engine._replicas.buckets]


@pytest.mark.parametrize("bucket_bytes", [400, 8 * 2**20])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_one_all_reduce_for_each_bucket_and_one_for_the_loss(
    pool: Pool, micro_batch: int | None, bucket_bytes: int
) -> None:
    case = Case(dp=2, global_batch=6, micro_batch=micro_batch, precision="fp32")
    for events, sizes in pool.run(collectives_of_a_step, 2, case, False, bucket_bytes):
        assert (len(sizes) == 1) == (bucket_bytes > 1000)
        single = "all_reduce 1"
        assert [event for event in events if event != single] == [f"all_reduce {size}" for size in sizes]
        # The loss; and as the model saves a buffer that is no BatchNorm's, the ranks ask each other whether it changed.
        assert events.count(single) == 2
        assert events[-1] == single


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_running_statistics_cost_one_for_values_and_one_for_counters(pool: Pool, micro_batch: int | None) -> None:
    case = Case(dp=2, global_batch=6, micro_batch=micro_batch, precision="fp32")
    for events, sizes in pool.run(collectives_of_a_step, 2, case, True, 8 * 2**20):
        agreement, statistics, counters = "all_reduce 1", "all_reduce 8", "all_reduce 1"
        assert events == [f"all_reduce {sizes[0]}", agreement, statistics, counters, "all_reduce 1"]


class Forked(nn.Module):
    """Takes one of two ways, as the sample has it: ranks use different parameters in the same micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.ways = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2))
        self.last = nn.Linear(3, 1)
        self.taken: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        way = int(x[0, 0] > 0)
        self.taken.append(way)
        return self.last(self.ways[way](self.first(x)))


def forked_step(seed: int) -> tuple[list[str], dict[str, Tensor], list[int]]:
    """The collectives, the gradients and the ways taken in the second step of eight samples, one at a time.

    The first one leaves gradients behind, also of what the second does not use.
    """
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=generator), "target": torch.randn(1, generator=generator)} for _ in range(8)]
    job = tm.Job(
        model=lambda: Forked(),
        data=data,
        inputs=("x",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.sgd(lr=0.1),
        global_batch=8,
        steps=2,
        seed=seed,
    )
    with buckets_of(50):
        engine, loader, _ = start(job, micro_batch=1)
    first, second = loader
    engine.step(first)
    engine.model.taken.clear()
    events: list[str] = []
    with recorded(events):
        engine.accumulate(replace(second, total_weight=8.0))
    gradients = {name: each.grad.clone() for name, each in engine.model.named_parameters()}
    return events, gradients, engine.model.taken


@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_that_use_other_parameters_start_the_same_collectives(pool: Pool, dp: int) -> None:
    ways_differed = False
    for seed in range(4):
        alone = pool.run(forked_step, 1, seed)[0][1]
        ranks = pool.run(forked_step, dp, seed)
        ways_differed |= len({taken[-1] for _, _, taken in ranks}) == 2
        for events, gradients, _ in ranks:
            assert events == ranks[0][0]
            assert len(events) > 5
            assert_close(gradients, alone, 1e-12, "gradient")
    assert ways_differed, "in no run did the last micro-batches of the ranks take different ways"


def events_of_a_step() -> list[str]:
    job = build_job(Case(dp=2, global_batch=6))
    layout = Layout(precision="fp64", micro_batch=1).resolve(world_size=2, global_batch=6)
    events: list[str] = []
    with buckets_of(400):
        engine = build_engine(job, layout, join(layout), Phases(observers=[lambda moment: events.append(moment.point)]))
    _, loader, _ = start(job, micro_batch=1)
    batch = next(iter(loader))
    with recorded(events):
        engine.step(replace(batch, total_weight=1.0))
    return events


def test_the_first_reduction_starts_under_the_last_backward(pool: Pool) -> None:
    for events in pool.run(events_of_a_step, 2):
        backwards = [index for index, event in enumerate(events) if event == "backward"]
        reductions = [index for index, event in enumerate(events) if event.startswith("all_reduce")]
        assert len(backwards) == 3
        assert backwards[-1] < reductions[0] < events.index("synchronize")
