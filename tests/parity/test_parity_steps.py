"""One step, and five, equal one process that sees the whole global batch at once (invariants 4, 5, 6, 12)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import pytest
from parity_engine import assert_close, assert_same_bits, assert_state_close, engine_run
from parity_jobs import Case
from parity_plain import Trace, plain_run

from pool import Pool
from trimaran.prove.tolerances import TOLERANCES, excesses

FP64, FP32, HALF = (TOLERANCES[precision] for precision in ("fp64", "fp32", "bf16"))

plain = cache(plain_run)


def reference(case: Case) -> Trace:
    """One process does not know how a batch is cut."""
    return plain(Case(**{**vars(case), "dp": 1, "micro_batch": None}))


def check(pool: Pool, case: Case, tolerance: float, *, judge_state: bool = True) -> None:
    traces = pool.run(engine_run, case.dp, case)
    assert_same_bits(traces)
    expected, actual = reference(case), traces[0]
    assert len(expected.losses) == len(actual.losses)
    assert_close(actual.first_gradients, expected.first_gradients, tolerance, "first gradient")
    assert actual.norms[0] == pytest.approx(expected.norms[0], rel=tolerance, abs=0)
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=tolerance, abs=0)
    if judge_state:
        assert actual.norms == pytest.approx(expected.norms, rel=tolerance, abs=0)
        assert actual.losses == pytest.approx(expected.losses, rel=tolerance, abs=0)
        assert_close(actual.weights, expected.weights, tolerance, "weight")
        assert_state_close(actual.state, expected.state, tolerance)


# Batches of 7, the last one of 4, over two epochs of 16 samples. Micro-batches: whole, three of them, and sizes that
# divide nothing; of single samples, so that some have no label that counts.
CUTS = [(1, None), (1, 3), (1, 4), (2, None), (2, 2), (2, 3), (3, None), (3, 1), (3, 2), (4, None), (4, 1)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("dp", "micro_batch"), CUTS)
def test_five_steps_in_float64(
    pool: Pool, dp: int, micro_batch: int | None, optimizer: Literal["sgd", "adamw"]
) -> None:
    check(pool, Case(dp=dp, micro_batch=micro_batch, optimizer=optimizer), FP64)


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=4, global_batch=3, num_samples=8, epochs=1.75),  # more ranks than samples, the last batch of two
        Case(dp=3, global_batch=1, num_samples=3, clip=None),  # a sample at a time
        Case(dp=4, global_batch=12, num_samples=60, epochs=1, micro_batch=1),  # what divides evenly, too
        Case(dp=2, micro_batch=2, own_loss=True),
        Case(dp=3, micro_batch=1, own_loss=True, optimizer="adamw"),
        Case("convnet", dp=1, micro_batch=2),
        Case("convnet", dp=2, micro_batch=3),
        Case("convnet", dp=3, micro_batch=1, optimizer="adamw"),
        Case("convnet", dp=4),
    ],
    ids=str,
)
def test_other_batches_losses_and_models_in_float64(pool: Pool, case: Case) -> None:
    check(pool, case, FP64)


@pytest.mark.parametrize("model", ["transformer", "convnet"])
@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 3), (2, None), (3, 2), (4, 1)])
def test_sgd_in_float32(pool: Pool, model: Literal["transformer", "convnet"], dp: int, micro_batch: int | None) -> None:
    check(pool, Case(model, dp=dp, micro_batch=micro_batch, precision="fp32"), FP32)


def test_adamw_in_float32_is_judged_by_its_first_gradients(
    pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    """Where a true gradient is zero AdamW makes an update of its rounding noise: weights are reported (--junit-xml)."""
    case = Case(dp=2, micro_batch=2, precision="fp32", optimizer="adamw")
    check(pool, case, FP32, judge_state=False)
    excess = excesses(pool.run(engine_run, 2, case)[0].weights, reference(case).weights)
    worst = max(excess, key=lambda name: excess[name])
    record_property("largest difference of a weight after five steps", f"{excess[worst]:.1e} ({worst})")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 2), (2, None), (3, 1)])
def test_half_precision_means_one_thing(
    pool: Pool, dp: int, micro_batch: int | None, precision: Literal["bf16", "fp16"]
) -> None:
    for model in ("transformer", "convnet"):
        case = Case(model, dp=dp, micro_batch=micro_batch, precision=precision)  # type: ignore[arg-type]
        assert_close(
            pool.run(engine_run, dp, case)[0].first_gradients, reference(case).first_gradients, HALF, "first gradient"
        )
