"""The words of a head: batch arithmetic, lengths, memory."""

from __future__ import annotations

from typing import Any

import pytest

import trimaran as tm
from trimaran.engine import StateBytes
from trimaran.layout import Layout
from trimaran.run.describe import Origin, describe_batch, describe_length, describe_state, identify


def job(**changes: Any) -> tm.Job:
    values: dict[str, Any] = {
        "model": lambda: None,
        "data": list(range(1000)),
        "loss": tm.losses.mse(),
        "optimizer": tm.optim.adamw(lr=1e-3),
        "global_batch": 64,
        "steps": 1000,
    }
    return tm.Job(**values | changes)


@pytest.mark.parametrize(
    ("layout", "world_size", "said"),
    [
        ("micro_batch=8", 2, "64 samples = 2 dp × 8 micro-batch × 4 accumulated"),
        ("", 1, "64 samples = 1 dp × 64 micro-batch × 1 accumulated"),
        ("", 3, "64 samples ≤ 3 dp × 22 micro-batch × 1 accumulated"),
        ("micro_batch=5", 3, "64 samples ≤ 3 dp × 5 micro-batch × 5 accumulated"),
        ("", 100, "64 samples ≤ 100 dp × 1 micro-batch × 1 accumulated"),
    ],
)
def test_the_batch_arithmetic(layout: str, world_size: int, said: str) -> None:
    resolved = Layout.parse(layout).resolve(world_size=world_size, global_batch=64)
    assert describe_batch(job(), resolved) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "1,000 steps = 64 epochs of 1,000 samples"),
        ({"steps": 1, "global_batch": 1}, "1 step = 1e-3 epochs of 1,000 samples"),
        ({"steps": None, "epochs": 1}, "16 steps = 1 epoch of 1,000 samples"),
        ({"data": [0]}, "1,000 steps = 6.4e4 epochs of 1 sample"),
    ],
)
def test_the_length(changes: dict[str, Any], said: str) -> None:
    described = job(**changes)
    assert describe_length(described, described.total_samples) == said


def test_the_memory() -> None:
    state = StateBytes(parameters=26 * 2**20, gradients=2**20, optimizer=None)
    assert describe_state(state) == "parameters 26 MiB + gradients 1 MiB + optimizer unknown"
    assert describe_state(state, short=True) == "26 MiB + 1 MiB + unknown"


def test_an_identity_is_of_the_job_and_not_of_its_layout() -> None:
    assert identify(job(), Origin()) == identify(job(), Origin())
    assert identify(job(), Origin(arguments={"width": 3}))["arguments"] == {"width": 3}
    for changes in ({"clip": 1.0}, {"seed": 1}, {"data": list(range(1001))}, {"loss": tm.losses.mse(target="y")}):
        assert identify(job(**changes), Origin()) != identify(job(), Origin())


def test_an_object_without_a_repr_of_its_own_is_the_same_in_every_process() -> None:
    class Mine:
        def weight(self, batch: Any, /) -> Any: ...

        def total(self, output: Any, batch: Any, /) -> Any: ...

    first = job(loss=Mine(), metrics={"mine": Mine()}, data=[{"x": 1}])
    other = job(loss=Mine(), metrics={"mine": Mine()}, data=[{"x": 1}])
    assert identify(first, Origin(arguments={"of": Mine()})) == identify(other, Origin(arguments={"of": Mine()}))
