"""Tensor and sequence parallelism equal one process: gradients, norms, weights, optimizer state (invariants 4-6)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from parity_engine import assert_close, assert_same_bits, assert_state_close, excesses
from tensor_jobs import TensorCase, engine_run, plain_run
from test_parity_steps import FP32, FP64

from pool import Pool

plain = cache(plain_run)


def check(pool: Pool, case: TensorCase, tolerance: float) -> None:
    traces = pool.run(engine_run, case.num_ranks, case)
    assert_same_bits(traces)
    expected, actual = plain(replace(case, layout="", micro_batch=None, plan="whole")), traces[0]
    assert_close(actual.first_gradients, expected.first_gradients, tolerance, "first gradient")
    assert actual.norms == pytest.approx(expected.norms, rel=tolerance, abs=0)
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance, abs=0)
    assert_close(actual.weights, expected.weights, tolerance, "weight")
    assert_state_close(actual.state, expected.state, tolerance)


@pytest.mark.parametrize(
    "case",
    [
        TensorCase("tp=2"),
        TensorCase("tp=2", tied=True, micro_batch=2, optimizer="adamw"),
        TensorCase("tp=2 sp=true", micro_batch=2, optimizer="adamw"),
        TensorCase("tp=2 sp=true", tied=True),
        TensorCase("tp=4", tied=True, micro_batch=3),
        TensorCase("tp=4 sp=true", optimizer="adamw"),
        TensorCase("dp=2 tp=2", micro_batch=2, optimizer="adamw"),
        TensorCase("dp=2 tp=2 sp=true", tied=True, micro_batch=1),
    ],
    ids=str,
)
def test_five_steps_in_float64(pool: Pool, case: TensorCase) -> None:
    check(pool, case, FP64)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true"])
@pytest.mark.parametrize("attend", ["manual", "chunk", "split", "view", "heads_first", "grouped"])
def test_every_way_of_writing_attention(pool: Pool, attend: str, layout: str) -> None:
    check(pool, TensorCase(layout, attend=attend, micro_batch=3), FP64)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["tp=2", "tp=4 sp=true"])
def test_a_vocabulary_that_tp_does_not_divide(pool: Pool, layout: str, tied: bool) -> None:
    check(pool, TensorCase(layout, vocabulary=13, tied=tied), FP64)
    check(pool, TensorCase(layout, vocabulary=13, tied=tied, smoothing=0.1), FP64)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true", "dp=2 tp=2 sp=true"])
def test_what_is_not_declared_is_replicated(pool: Pool, layout: str) -> None:
    check(pool, TensorCase(layout, plan="blocks", tied=True, micro_batch=2), FP64)


@pytest.mark.parametrize(
    "layout",
    ["zero=1", "zero=2 sp=true", "zero=3 recompute=full", "zero=3 sp=true recompute=selective", "recompute=full"],
)
def test_with_shards_and_recompute(pool: Pool, layout: str) -> None:
    check(pool, TensorCase(f"dp=2 tp=2 {layout}", attend="chunk", micro_batch=2), FP64)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true"])
def test_an_own_loss(pool: Pool, layout: str) -> None:
    check(pool, TensorCase(layout, own_loss=True, micro_batch=2), FP64)


@pytest.mark.parametrize("layout", ["tp=2", "dp=2 tp=2 sp=true"])
def test_bf16_is_as_near_to_float64_as_on_one_process(pool: Pool, layout: str) -> None:
    """Partial sums are rounded once more each: what differs from one process is of the size of its own rounding."""
    case = TensorCase(layout, precision="bf16", attend="chunk")
    exact = plain(replace(case, layout="", precision="fp64")).first_gradients
    mine = pool.run(engine_run, case.num_ranks, case)[0].first_gradients
    theirs = pool.run(engine_run, 1, replace(case, layout=""))[0].first_gradients
    errors = [
        max(excesses({name: each.double() for name, each in one.items()}, exact).values()) for one in (mine, theirs)
    ]
    assert errors[0] < 1.5 * errors[1]


def test_sgd_in_float32(pool: Pool) -> None:
    check(pool, TensorCase("dp=2 tp=2 sp=true", precision="fp32", micro_batch=2), FP32)
