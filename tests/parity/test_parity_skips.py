"""A step whose gradient is not finite is skipped by all ranks alike (invariant 7); fp16 scales its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from parity_engine import start
from parity_jobs import Case, build_job
from parity_plain import optimizer_state
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from trimaran.layout import Precision

Kind = Literal["adamw", "sgd", "rmsprop"]


@dataclass
class Told:
    """What a rank saw: by step, and at the end."""

    skipped: list[bool]
    rates: list[float]
    scales: list[float]
    changed: list[bool]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def job_with(kind: Kind, clip: float | None = 0.5) -> tm.Job:
    optimizer = {
        "adamw": tm.optim.adamw(lr=0.01),
        "sgd": tm.optim.sgd(lr=0.1, momentum=0.9, weight_decay=0.1),
        "rmsprop": tm.optim.by_reference(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    }[kind]
    job = build_job(Case(clip=clip))
    return replace(job, optimizer=optimizer, schedule=tm.optim.linear(warmup="3steps"))


def poisoned_run(
    kind: Kind, precision: Precision, poison: float, bad_steps: tuple[int, ...], left_out: tuple[int, ...] = ()
) -> Told:
    """Trains; on `bad_steps` one gradient of the last rank is poisoned. Batches `left_out` are never seen."""
    engine, loader, world = start(job_with(kind), precision=precision, micro_batch=2)
    trained = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
    is_bad = False
    if world.rank == world.size - 1:
        trained["up.weight"].register_hook(lambda grad: torch.full_like(grad, poison) if is_bad else grad)
    told = Told([], [], [], [], {}, {})
    for batch in loader:
        if batch.index in left_out:
            continue
        is_bad = batch.index in bad_steps
        before = {name: each.detach().clone() for name, each in trained.items()}
        moments = optimizer_state(engine.optimizer, trained)
        result = engine.step(batch)
        now = optimizer_state(engine.optimizer, trained)
        told.skipped.append(result.skipped)
        told.rates.append(result.lr)
        told.scales.append(engine.loss_scale.value if engine.loss_scale else 1.0)
        moved = any(not torch.equal(each, before[name]) for name, each in trained.items())
        moved |= any(not torch.equal(each, moments.get(name, torch.zeros_like(each))) for name, each in now.items())
        told.changed.append(moved)
    told.weights = {name: each.detach().clone() for name, each in trained.items()}
    told.state = optimizer_state(engine.optimizer, trained)
    return told


@pytest.mark.parametrize("bad_step", [0, 2])
@pytest.mark.parametrize(
    ("kind", "precision"), [("adamw", "fp32"), ("sgd", "fp32"), ("sgd", "fp64"), ("rmsprop", "fp32")]
)
def test_a_bad_step_leaves_no_trace_on_any_rank(pool: Pool, kind: Kind, precision: Precision, bad_step: int) -> None:
    poison = float("inf") if bad_step else float("nan")
    told = pool.run(poisoned_run, 3, kind, precision, poison, (bad_step,))
    without = pool.run(poisoned_run, 3, kind, precision, poison, (), (bad_step,))
    for rank, other in zip(told, without, strict=True):
        assert rank.skipped == [step == bad_step for step in range(5)]
        assert rank.changed == [step != bad_step for step in range(5)]
        # The schedule counts updates, and all that follows is as if the bad batch had never been there.
        assert [rate for step, rate in enumerate(rank.rates) if step != bad_step] == other.rates
        assert all(torch.equal(each, other.weights[name]) for name, each in rank.weights.items())
        assert all(torch.equal(each, other.state[name]) for name, each in rank.state.items())
        assert all(torch.equal(each, told[0].weights[name]) for name, each in rank.weights.items())


def test_the_loss_scale_shrinks_alike(pool: Pool) -> None:
    told = pool.run(poisoned_run, 2, "adamw", "fp16", float("inf"), (0, 2, 3))
    for rank in told:
        assert rank.skipped == [True, False, True, True, False]
        # Settled at the next step, so that nobody waits for a step to end.
        assert rank.scales == [2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**13]
        assert rank.changed == [False, True, False, False, True]
        assert all(torch.equal(each, told[0].weights[name]) for name, each in rank.weights.items())


def growing_run() -> list[float]:
    engine, loader, _ = start(job_with("sgd"), precision="fp16")
    assert engine.loss_scale is not None
    engine.loss_scale.value, engine.loss_scale.growth_interval = 64.0, 2
    scales = []
    for batch in loader:
        assert not engine.step(batch).skipped
        scales.append(engine.loss_scale.value)
    return scales


def test_the_loss_scale_grows_after_good_steps(pool: Pool) -> None:
    assert pool.run(growing_run, 2) == [[64.0, 64.0, 128.0, 128.0, 256.0]] * 2


def first_update(precision: Precision) -> tuple[float, float]:
    """The gradient's norm in the first step, and how far that step moved the weights; nothing decays."""
    job = replace(job_with("sgd", clip=0.1), optimizer=tm.optim.sgd(lr=1.0), schedule=tm.optim.constant())
    engine, loader, _ = start(job, precision=precision)
    before = nn.utils.parameters_to_vector(engine.model.parameters()).detach().double()
    result = engine.step(next(iter(loader)))
    after = nn.utils.parameters_to_vector(engine.model.parameters()).detach().double()
    return result.grad_norm, float((after - before).norm())


def test_fp16_unscales_before_it_clips(pool: Pool) -> None:
    norm, moved = pool.run(first_update, 2, "fp16")[0]
    expected_norm, expected_moved = pool.run(first_update, 2, "fp32")[0]
    assert norm == pytest.approx(expected_norm, rel=0.01)
    assert expected_norm > 1
    assert expected_moved == pytest.approx(0.1, rel=1e-4)  # clipped
    assert moved == pytest.approx(expected_moved, rel=0.01)


def overflow() -> list[bool]:
    """A scale that float16 cannot hold; it shrinks until it can."""
    engine, loader, _ = start(job_with("adamw"), precision="fp16")
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**26
    batch = next(iter(loader))
    return [engine.step(batch).skipped for _ in range(16)]


def test_a_scale_too_large_shrinks_until_steps_are_made(pool: Pool) -> None:
    skipped = pool.run(overflow, 2)
    assert skipped[0] == skipped[1]
    num_skipped = sum(skipped[0])
    assert 0 < num_skipped < 16
    assert skipped[0] == [True] * num_skipped + [False] * (16 - num_skipped)
