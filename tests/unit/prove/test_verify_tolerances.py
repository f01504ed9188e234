"""The rule by which results are equal."""

from __future__ import annotations

import math

import pytest
import torch

from trimaran.prove.tolerances import TOLERANCES, excess, excesses, state_excesses

BIG, SMALL = torch.tensor([2.0, -4.0]).double(), torch.tensor([1e-9, 0.0]).double()


def test_a_tensor_is_measured_by_its_largest_number() -> None:
    assert excesses({"a": BIG + 4e-8}, {"a": BIG}) == {"a": pytest.approx(1e-8)}


def test_one_that_is_nothing_but_noise_is_measured_by_the_largest_of_all() -> None:
    found = excesses({"big": BIG, "small": SMALL * 2}, {"big": BIG, "small": SMALL})
    assert found == {"big": 0.0, "small": pytest.approx(1e-9 / 4e-3)}


@pytest.mark.parametrize("other", [None, BIG[:1], BIG.float(), BIG * math.nan, BIG * math.inf], ids=str)
def test_what_cannot_be_compared_never_passes(other: torch.Tensor | None) -> None:
    assert excesses({} if other is None else {"a": other}, {"a": BIG}) == {"a": math.inf}
    assert excesses({"a": BIG}, {} if other is None else {"a": other}) == {"a": math.inf}


def test_zero_and_nothing_are_equal_to_themselves() -> None:
    zero, empty = torch.zeros(3), torch.zeros(0)
    assert excesses({"a": zero, "b": empty}, {"a": zero, "b": empty}) == {"a": 0.0, "b": 0.0}
    assert excesses({"a": zero + 1}, {"a": zero}) == {"a": math.inf}
    assert excesses({}, {}) == {}


def test_each_kind_of_state_is_measured_by_itself() -> None:
    found = state_excesses({"w.exp_avg": BIG, "w.exp_avg_sq": SMALL * 2}, {"w.exp_avg": BIG, "w.exp_avg_sq": SMALL})
    assert found == {"w.exp_avg": 0.0, "w.exp_avg_sq": pytest.approx(1.0)}


def test_figures() -> None:
    assert excess(1.0, 2.0) == 0.5
    assert excess(0.0, 0.0) == excess(math.nan, math.nan) == excess(math.inf, math.inf) == 0.0
    assert excess(1.0, 0.0) == excess(math.nan, 1.0) == excess(1.0, math.nan) == math.inf


def test_the_tolerances_are_those_of_the_docs() -> None:
    assert TOLERANCES == {"fp64": 1e-12, "fp32": 2e-6, "tf32": 0.01, "bf16": 0.01, "fp16": 0.01}
