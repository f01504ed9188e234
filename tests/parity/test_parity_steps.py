"""One step, and five, equal one process that sees the whole global batch at once (invariants 4, 5, 6, 12)."""

from __future__ import annotations

from functools import cache

import pytest
from parity_engine import assert_close, assert_same_bits, assert_state_close, engine_run
from parity_jobs import Case
from parity_plain import Trace, plain_run

from pool import Pool

# docs/numerics.md; never widened to make a test pass.
FP64, FP32, HALF = 1e-12, 2e-6, 0.01

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
def test_five_steps_in_float64(pool: Pool, dp: int, micro_batch: int | None, optimizer: str) -> None:
    check(pool, Case(dp=dp, micro_batch=micro_batch, optimizer=optimizer), FP64)  # type: ignore[arg-type]
