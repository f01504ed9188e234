"""Two sides that differ by construction: what is judged, what is named first, and which cause is told."""

from __future__ import annotations

import copy
import json
import math
from functools import cache

import pytest
from prove_jobs import job
from test_verify_side import side_of

import trimaran as tm
from trimaran.errors import LayoutError
from trimaran.layout import Layout
from trimaran.prove.verify_cause import constant_ratio, name_factor
from trimaran.prove.verify_compare import Difference, Row, Verification, compare, refuse_other_cut
from trimaran.prove.verify_report import render_line, render_verification, verification_as_json
from trimaran.prove.verify_side import (
    EARLY_STATE,
    EARLY_WEIGHTS,
    FIRST_GRADIENTS,
    FIRST_WEIGHTS,
    SECOND_GRADIENTS,
    STATE,
    WEIGHTS,
    Side,
    Unlike,
)
from trimaran.prove.verify_traffic import Collectives

_recorded = cache(lambda precision, optimizer: side_of(_job(optimizer), f"precision={precision}", steps=3))


def _job(optimizer: str) -> tm.Job:
    return job(optimizer=tm.optim.sgd(lr=0.1, momentum=0.9) if optimizer == "sgd" else tm.optim.adamw(lr=1e-2))


def sides(precision: str = "fp64", optimizer: str = "adamw") -> tuple[Side, Side]:
    """Two equal ones, to be changed."""
    recorded = _recorded(precision, optimizer)
    return copy.deepcopy(recorded), copy.deepcopy(recorded)


def difference(side: Side, reference: Side) -> Difference:
    found = compare(side, reference).difference
    assert found is not None
    return found


def rows(verification: Verification) -> dict[str, Row]:
    return {row.name: row for row in verification.rows}


def test_equal_sides() -> None:
    verification = compare(*sides())
    assert verification.equal
    assert {row.status for row in verification.rows} == {"passed"}
    assert [row.excess for row in verification.rows] == [0.0] * len(verification.rows)
    assert not verification.not_compared


def test_rounding_passes_and_more_does_not() -> None:
    side, reference = sides()
    side.tensors[FIRST_GRADIENTS]["last.weight"] *= 1 + 5e-13
    assert compare(side, reference).equal
    side.tensors[FIRST_GRADIENTS]["last.weight"] *= 1 + 1e-11
    assert rows(compare(side, reference))["first gradients"].status == "failed"


@pytest.mark.parametrize(
    ("moment", "what"),
    [
        (FIRST_WEIGHTS, "first value"),
        (FIRST_GRADIENTS, "gradient in step 1"),
        (WEIGHTS, "weight after step 3"),
    ],
)
def test_a_tensor_that_is_off_is_named(moment: str, what: str) -> None:
    side, reference = sides()
    side.tensors[moment]["first.weight"][0, 0] += 0.5
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("first.weight", what)


def test_state_that_is_off_is_named() -> None:
    side, reference = sides()
    side.tensors[STATE]["first.weight.exp_avg"] += 1.0
    assert difference(side, reference).tensor == "first.weight.exp_avg"


def test_what_is_missing_is_found() -> None:
    side, reference = sides()
    del side.tensors[FIRST_GRADIENTS]["first.bias"]
    found = difference(side, reference)
    assert (found.tensor, found.excess, found.cause) == ("first.bias", math.inf, "it is missing on one side")


def test_gradients_are_named_in_the_order_of_a_backward() -> None:
    side, reference = sides()
    for name in ("first.weight", "last.weight"):
        side.tensors[FIRST_GRADIENTS][name] *= 2
    assert difference(side, reference).tensor == "last.weight"


def test_an_output_is_named_before_the_gradients_that_follow_from_it() -> None:
    side, reference = sides()
    side.tensors[FIRST_GRADIENTS]["last.weight"] *= 2
    output = next(each for each in side.activations if each.name == "first")
    output.values[3] += 0.1
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("first", "output in step 1")


def test_an_output_alone_is_no_difference_but_is_told() -> None:
    side, reference = sides()
    next(each for each in side.activations if each.name == "first").values[3] += 0.1
    verification = compare(side, reference)
    assert verification.equal
    assert any("the output of first" in each for each in verification.not_compared)


def test_causes_of_a_gradient() -> None:
    side, reference = sides()
    side.dp, side.num_micro_batches = 3, 5
    gradients = side.tensors[FIRST_GRADIENTS]
    right = gradients["last.bias"].clone()
    for factor, told in ((3, "3 = dp: counted once"), (1 / 3, "1 / dp: averaged over dp"), (5, "5 = micro-batches")):
        gradients["last.bias"] = right * factor
        assert told in difference(side, reference).cause
    gradients["last.bias"] = right * 0
    assert difference(side, reference).cause == "it is zero: nothing arrived"
    gradients["last.bias"] = right * 1.7
    assert difference(side, reference).cause == "off by a constant factor of 1.7"
    gradients["last.bias"] = right + right.flip(0)
    assert difference(side, reference).cause == "no constant factor"


def test_a_sum_that_is_missing() -> None:
    side, reference = sides()
    side.dp = side.num_ranks = 4
    right = side.tensors[FIRST_GRADIENTS]["last.bias"]
    side.tensors[FIRST_GRADIENTS]["last.bias"] = right.flip(0)
    side.unlike = [Unlike(FIRST_GRADIENTS, "last.bias", 2)]
    for factor, told in ((1, "reduction over dp is missing"), (2, "groups of 2 of the 4"), (1.5, "rank 2 holds")):
        side.rank_sums = {"dp": {"last.bias": right * factor}}
        assert told in difference(side, reference).cause


def test_gradients_of_the_step_before() -> None:
    side, reference = sides()
    side.tensors[SECOND_GRADIENTS]["last.bias"] += 0.3 * side.tensors[FIRST_GRADIENTS]["last.bias"]
    side.norms[1] *= 1.1
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("last.bias", "gradient in step 2")
    assert "was not dropped" in found.cause


def test_causes_of_an_update() -> None:
    side, reference = sides(optimizer="sgd")
    start, right = (side.tensors[moment]["last.bias"].clone() for moment in (FIRST_WEIGHTS, EARLY_WEIGHTS))
    side.tensors[WEIGHTS]["last.bias"] += 1.0
    side.tensors[EARLY_WEIGHTS]["last.bias"] = start
    assert difference(side, reference).cause == "it was not updated"
    side.tensors[EARLY_WEIGHTS]["last.bias"] = start + 2.5 * (right - start)
    assert difference(side, reference).cause == "its update is off by a factor of 2.5"
    side.tensors[EARLY_STATE]["last.bias.momentum_buffer"] *= 2.5
    assert difference(side, reference).cause == "its gradient was multiplied by 2.5 on the way"


def test_another_parameter_group_is_named() -> None:
    side, reference = sides()
    side.options = {name: dict(each) for name, each in side.options.items()}
    side.options["last.bias"]["weight_decay"] = 0.3
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("last.bias", "optimizer group")
    assert "weight_decay is 0.3 here, and 0.0 in the reference" in found.cause


def test_figures_are_judged_by_step_and_named() -> None:
    side, reference = sides()
    side.losses[1] *= 1.5
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("loss", "figure of step 2")
    assert rows(compare(side, reference))["loss"].worst == "step 2"


def test_a_parameter_counted_twice_in_the_norm() -> None:
    side, reference = sides()
    side.tp = 3
    square = float(reference.at(FIRST_GRADIENTS)["first.bias"].square().sum())
    side.norms[0] = (reference.norms[0] ** 2 + 2 * square) ** 0.5
    assert difference(side, reference).cause == "first.bias is counted 3 times = tp"


def test_ranks_that_hold_unlike_weights() -> None:
    side, reference = sides()
    side.num_ranks = side.dp = 2
    side.unlike = [Unlike(EARLY_WEIGHTS, "first.bias", 1)]
    found = difference(side, reference)
    assert (found.tensor, found.what) == ("first.bias", "weight after step 1 on rank 1")
    assert "first.bias on rank 1, weights after step 1" in rows(compare(side, reference))["ranks hold the same"].worst


@pytest.mark.parametrize(("optimizer", "status"), [("sgd", "failed"), ("adamw", "reported")])
def test_float32_promises_what_follows_an_update_of_sgd_only(optimizer: str, status: str) -> None:
    side, reference = sides("fp32", optimizer)
    side.tensors[WEIGHTS]["first.bias"] += 1e-4
    verification = compare(side, reference)
    assert rows(verification)["weights after 3 steps"].status == status
    assert verification.equal == (status == "reported")
    assert any("precision=fp64" in each for each in verification.not_compared) == (status == "reported")


def test_half_precision_promises_first_gradients_to_one_percent() -> None:
    side, reference = sides("bf16", "sgd")
    side.tensors[FIRST_GRADIENTS]["last.weight"] *= 1.005
    side.losses[2] *= 2
    assert compare(side, reference).equal
    side.tensors[FIRST_GRADIENTS]["last.weight"] *= 1.01
    assert not compare(side, reference).equal


def test_batch_statistics_need_the_same_cut() -> None:
    side, _ = sides()
    whole, halves = (
        Layout.parse(text).resolve(world_size=1, global_batch=32)
        for text in ("precision=fp64", "precision=fp64 micro_batch=16")
    )
    refuse_other_cut(side, halves)
    side.batch_norms = ["norm"]
    refuse_other_cut(side, whole)
    with pytest.raises(LayoutError, match="over forwards of 32 samples") as raised:
        refuse_other_cut(side, halves)
    assert "and of 16 in" in raised.value.value


def test_names_of_factors() -> None:
    side, reference = sides()
    side.dp, side.tp, side.num_micro_batches, side.loss_scale = 3, 5, 7, 8192.0
    for ratio, name in (
        (3, "3 = dp"),
        (1 / 5, "0.2 = 1 / tp"),
        (49, "49 = micro-batches²"),
        (5**0.5, "2.23607 = √tp"),
        (15, "15 = (dp · tp)"),
        (8192, "8192 = the loss scale"),
        (1, ""),
        (1.2345, ""),
        (math.inf, ""),
    ):
        assert name_factor(ratio, side, reference) == name


def test_a_constant_ratio() -> None:
    side, _ = sides()
    tensor = side.tensors[FIRST_GRADIENTS]["last.weight"]
    assert constant_ratio(tensor * -2, tensor, side) == pytest.approx(-2)
    assert constant_ratio(tensor, tensor, side) is None
    assert constant_ratio(tensor + 1, tensor, side) is None
    assert constant_ratio(tensor, tensor * 0, side) is None


def test_reports() -> None:
    side, reference = sides()
    side.collectives = {"allreduce": Collectives(2, 3 * 2**20), "allgather_base": Collectives(1, 2**10)}
    side.losses[0] *= math.inf
    verification = compare(side, reference)
    text = render_verification(verification)
    assert "failed   loss" in text
    assert "differs  first in loss: figure of step 1, off by unlike" in text
    assert "2 all-reduce (3" in text
    assert render_line(verification).startswith("differs  dp=1 micro_batch=32 precision=fp64  loss: figure of step 1")
    told = json.loads(json.dumps(verification_as_json(verification), allow_nan=False))
    assert told["difference"] == {"tensor": "loss", "what": "figure of step 1", "excess": None, "cause": ""}
    assert told["collectives"]["allreduce"] == {"count": 2, "bytes": 3 * 2**20}
