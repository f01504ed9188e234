from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from trimaran.data import default_collate, pad
from trimaran.data.collate import as_batch
from trimaran.errors import DataError


def test_tensors_arrays_numbers_and_lists_are_stacked() -> None:
    frozen = np.arange(3, dtype=np.float32)
    frozen.setflags(write=False)
    row = {"t": torch.ones(2, dtype=torch.int32), "a": frozen, "n": 3, "f": 0.5, "l": [1, 2], "s": np.int64(4)}
    batch = default_collate([row, row])
    assert {key: (tuple(value.shape), value.dtype) for key, value in batch.items()} == {
        "t": ((2, 2), torch.int32),
        "a": ((2, 3), torch.float32),
        "n": ((2,), torch.int64),
        "f": ((2,), torch.float32),
        "l": ((2, 2), torch.int64),
        "s": ((2,), torch.int64),
    }


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1, 2)], "A sample is of type tuple"),
        ([{"a": 1}, {"b": 1}], r"the keys \['a'\] and \['b'\]"),
        ([{"a": "text"}], "'a' of a sample is of type str"),
        ([{"a": None}], "'a' of a sample is of type NoneType"),
        ([{"a": ["text"]}], "'a' of a sample is a list that is no tensor"),
        ([{"a": [[1], [1, 2]]}], "'a' of a sample is a list that is no tensor"),
        ([{"a": [1]}, {"a": [1, 2]}], r"'a' has the shapes \(1,\), \(2,\).*\n.*tm.data.pad\({\"a\""),
        ([{"a": 1}, {"a": 1.5}], "'a' has the dtypes torch.int64, torch.float32"),
    ],
)
def test_what_cannot_be_stacked_is_named(samples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        default_collate(samples)


def test_any_mapping_of_tensors_is_a_batch() -> None:
    assert as_batch(UserDict(x=torch.zeros(2, 3)), 2).keys() == {"x"}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(2),), "returned a value of type tuple"),
        ({}, "an empty mapping"),
        ({"x": [1, 2]}, "'x' of a batch is of type list"),
        ({"x": torch.zeros(2), "y": torch.zeros(3, 1)}, r"'y' of a batch of 2 .* \(3, 1\) \(all: 'x': \(2,\), 'y': "),
        ({"x": torch.zeros(())}, r"'x' of a batch of 2 samples has the shape \(\)"),
        ({"x": torch.zeros(2, requires_grad=True)}, "'x' of a batch requires a gradient"),
        ({"x": torch.zeros(2, device="meta")}, "'x' of a batch lies on meta"),
    ],
)
def test_what_is_no_batch_is_named(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_batch(batch, 2)


ROWS = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3], "kind": 0}, {"input_ids": [8], "labels": [4], "kind": 1}]


def test_pad_fills_on_the_right() -> None:
    batch = pad({"input_ids": 9}, multiple_of=4, attention_mask_of="input_ids")(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["kind"].tolist() == [0, 1]
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_pad_takes_masks_dtypes_and_other_lengths_as_they_are() -> None:
    rows = [
        {"input_ids": torch.ones(n, dtype=torch.int32), "attention_mask": [1] * n, "weights": [0.5] * (2 * n)}
        for n in (1, 2)
    ]
    batch = pad({"input_ids": 0, "weights": 0.25})(rows)
    assert batch["input_ids"].dtype == torch.int32
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["weights"].tolist() == [[0.5, 0.5, 0.25, 0.25], [0.5] * 4]


def test_pad_leaves_one_label_for_each_sample() -> None:
    assert pad({"input_ids": 0})([{"input_ids": [1], "labels": 3}])["labels"].tolist() == [3]


@pytest.mark.parametrize(
    ("collate", "rows", "message"),
    [
        (pad({"ids": 0}), ROWS, "pad is told about 'ids'"),
        (pad({"labels": 0}), ROWS, "'input_ids' has the shapes"),
        (pad({"kind": 0, "input_ids": 0}), ROWS, r"'kind' of a sample has the shape \(\)"),
        (pad({"x": 0}), [{"x": [1]}, {"x": [0.5]}], "'x' has the dtypes"),
        (
            pad({"x": 0}, attention_mask_of="x"),
            [{"x": [1], "attention_mask": [1]}],
            "have an 'attention_mask' already",
        ),
    ],
)
def test_what_cannot_be_padded_is_named(collate: Any, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate(rows)


def test_pad_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(DataError, match="multiple_of=0"):
        pad({"x": 0}, multiple_of=0)
    with pytest.raises(DataError, match="attention_mask_of='y'"):
        pad({"x": 0}, attention_mask_of="y")
