"""Values of an optimizer's state as JSON and tensors, and back: the same, or refused."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trimaran.checkpoint.packing import pack, unpack
from trimaran.errors import CheckpointError

leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.floats()),
    st.integers(0, 100).map(torch.tensor),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "a.b", "", "'", "0"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def alike(one: Any, other: Any) -> bool:
    """Equal, of equal types, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@settings(max_examples=60, deadline=None)
@given(values)
def test_what_is_packed_comes_back(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(value, "w", tensors), allow_nan=False)
    assert alike(unpack(json.loads(text), tensors.__getitem__), value)
    assert all(key == "w" or key.startswith(("w.", "w'")) for key in tensors)


def test_names_that_join_to_the_same_key_stay_two_tensors() -> None:
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    tensors: dict[str, Tensor] = {}
    assert alike(unpack(pack(value, "w", tensors), tensors.__getitem__), value)
    assert len(tensors) == 2


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {1, 2}, b"bytes", OrderedDict(a=1), torch.float32, lambda: 0, range(3)]
)
def test_what_cannot_be_packed_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^w\.deep is .*, a {type(value).__name__}\."):
        pack({"deep": value}, "w", {})


@pytest.mark.parametrize(
    "packed",
    [
        [1, 2],
        {},
        {"tensor": 1},
        {"tensor": "t", "float": "nan"},
        {"float": "1e5"},
        {"float": 1.0},
        {"object": "os.system"},
        {"list": {"a": 1}},
        {"list": [1]},
        {"list": [["0"]]},
        {"tuple": [["0", [1]]]},
        {"dict": [[1, 2]]},
        {"dict": [["a", 1, 2]]},
        {"dict": {"a": 1}},
        {"dict": [["a", {"__reduce__": []}]]},
    ],
)
def test_what_was_never_packed_is_refused(packed: Any) -> None:
    def read(key: str) -> Tensor:
        raise AssertionError(key)

    with pytest.raises(CheckpointError, match=r"a value of the checkpoint's state is ") as caught:
        unpack(packed, read)
    assert caught.value.remedy
