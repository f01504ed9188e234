"""ZeRO 1 to 3 and hybrid shards equal one process: gradients, norms, weights, optimizer state (invariants 4-7, 12)."""

from __future__ import annotations

from typing import Literal

import pytest
from parity_engine import assert_close, assert_same_bits, engine_run
from parity_jobs import Case
from test_parity_steps import FP32, FP64, HALF, check, reference

from pool import Pool

STAGES = ("zero=1", "zero=2", "zero=3")
LAYOUTS = [(2, stage) for stage in STAGES] + [(3, "zero=3")] + [(4, f"{stage} shard=2") for stage in STAGES]


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(("dp", "layout"), LAYOUTS)
def test_five_steps_in_float64(pool: Pool, dp: int, layout: str, micro_batch: int | None) -> None:
    for optimizer in ("sgd", "adamw"):
        check(pool, Case("stack", optimizer, dp=dp, layout=layout, micro_batch=micro_batch), FP64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, layout="zero=1", micro_batch=2, own_loss=True),
        Case(dp=4, layout="zero=2", global_batch=3, num_samples=8, epochs=1.75),  # more ranks than samples
        Case("convnet", dp=2, layout="zero=3", micro_batch=3),
        Case("convnet", dp=4, layout="zero=2 shard=2", optimizer="adamw"),
        Case("stack", dp=4, layout="zero=3", micro_batch=1, optimizer="adamw"),
    ],
    ids=str,
)
def test_other_models_and_batches_in_float64(pool: Pool, case: Case) -> None:
    check(pool, case, FP64)


@pytest.mark.parametrize("layout", STAGES)
def test_sgd_in_float32(pool: Pool, layout: str) -> None:
    check(pool, Case("stack", dp=2, layout=layout, micro_batch=2, precision="fp32"), FP32)


@pytest.mark.parametrize("layout", ["zero=1", "zero=3"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_means_one_thing(pool: Pool, precision: Literal["bf16", "fp16"], layout: str) -> None:
    case = Case("stack", dp=2, layout=layout, micro_batch=2, precision=precision)
    expected = reference(case).first_gradients
    assert_close(pool.run(engine_run, 2, case)[0].first_gradients, expected, HALF, "first gradient")


@pytest.mark.parametrize("layout", ["zero=3 recompute=full", "zero=2 recompute=selective", "recompute=full"])
def test_recompute_changes_nothing(pool: Pool, layout: str) -> None:
    check(pool, Case("stack", dp=2, layout=layout, micro_batch=2), FP64)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["compile=true", "zero=3 compile=true recompute=full"])
def test_compiled_blocks_change_nothing(pool: Pool, layout: str) -> None:
    case = Case("stack", dp=2, layout=layout, global_batch=8, epochs=1)  # few shapes: each is compiled
    traces = pool.run(engine_run, 2, case, timeout=400)
    assert_same_bits(traces)
    assert_close(traces[0].first_gradients, reference(case).first_gradients, FP64, "first gradient")
    assert_close(traces[0].weights, reference(case).weights, FP64, "weight")
