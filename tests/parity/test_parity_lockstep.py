"""Lockstep (invariant 12) and bits: the same step gives the same bits, twice, and right after a fresh start."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity_engine import assert_same_bits, buckets_of, engine_run, start
from parity_jobs import Case, build_job
from parity_plain import optimizer_state
from torch import Tensor

from pool import Pool

FROM_STEP = 3


@dataclass
class Step:
    """All the bits of one step."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def make_step(engine: Any, batch: Any) -> Step:
    trained = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
    engine.accumulate(batch)
    gradients = {name: each.grad.clone() for name, each in trained.items()}
    result = engine.update()
    weights = {name: each.detach().clone() for name, each in trained.items()}
    return Step(result.loss, result.grad_norm, gradients, weights, optimizer_state(engine.optimizer, trained))


def later_and_fresh(case: Case) -> tuple[Step, Step, int]:
    """A step of a longer run, and the same one of an engine just built, given the longer run's state."""
    job = build_job(case)
    with buckets_of(400):  # several, which torch's DDP would arrange anew after its first step
        engine, loader, _ = start(job, precision=case.precision, micro_batch=case.micro_batch)
    batches = list(loader)
    for batch in batches[:FROM_STEP]:
        engine.step(batch)
    weights, moments = copy.deepcopy(engine.model.state_dict()), copy.deepcopy(engine.optimizer.state_dict())
    later = make_step(engine, batches[FROM_STEP])

    with buckets_of(400):
        fresh, loader, _ = start(job, precision=case.precision, micro_batch=case.micro_batch, first_step=FROM_STEP)
    fresh.model.load_state_dict(weights)
    fresh.optimizer.load_state_dict(moments)
    fresh.num_updates = FROM_STEP
    num_buckets = len(fresh._replicas.buckets) if fresh._replicas else 0
    return later, make_step(fresh, next(iter(loader))), num_buckets


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_a_step_after_a_fresh_start_has_the_bits_of_the_longer_run(pool: Pool, dp: int, optimizer: str) -> None:
    case = Case(dp=dp, micro_batch=2, precision="fp32", optimizer=optimizer)  # type: ignore[arg-type]
    for later, fresh, num_buckets in pool.run(later_and_fresh, dp, case):
        assert dp == 1 or num_buckets >= 4
        assert later.loss == fresh.loss
        assert later.norm == fresh.norm
        for one, other in (
            (later.gradients, fresh.gradients),
            (later.weights, fresh.weights),
            (later.state, fresh.state),
        ):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_repeated_has_the_same_bits(pool: Pool, precision: str) -> None:
    case = Case(dp=3, micro_batch=1, precision=precision, optimizer="adamw")  # type: ignore[arg-type]
    assert_same_bits([*pool.run(engine_run, 3, case), *pool.run(engine_run, 3, case)])


@pytest.mark.parametrize(("dp", "global_batch", "micro_batch"), [(3, 7, 1), (4, 3, 1), (4, 9, 2), (2, 5, 3)])
def test_all_ranks_run_as_many_forwards(pool: Pool, dp: int, global_batch: int, micro_batch: int) -> None:
    case = Case(dp=dp, global_batch=global_batch, micro_batch=micro_batch)
    counts = [trace.num_forwards for trace in pool.run(engine_run, dp, case)]
    steps = -(-32 // global_batch)
    assert counts == [counts[0]] * dp
    assert counts[0] >= steps
