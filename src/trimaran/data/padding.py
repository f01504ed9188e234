"""Padding: ragged sequences as one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.data.collate import Collate, check_same_dtype, columns, stack
from trimaran.errors import DataError

_KNOWN_FILLS: Mapping[str, float] = {"labels": -100, "attention_mask": 0}


def pad(fills: Mapping[str, float], *, multiple_of: int = 1, attention_mask_of: str | None = None) -> Collate:
    """A collate that pads 1-D sequences on the right, to the longest of the micro-batch.

    fills: key -> what to pad it with, such as {"input_ids": tokenizer.pad_token_id}. `labels` are padded with -100 and
    `attention_mask` with 0 where they are sequences, unless it says otherwise; all other keys are stacked.
    multiple_of: widths are rounded up to a multiple of this many elements.
    attention_mask_of: adds "attention_mask" [samples, width], int64: 1 where this key had an element, 0 in the padding.
    Raises DataError, here and while loading, for a key that is missing, ragged without a fill value, or not 1-D.
    """
    if multiple_of < 1:
        raise DataError(f"multiple_of={multiple_of}.", "It counts elements.", "Give a whole number from 1.")
    if attention_mask_of is not None and attention_mask_of not in fills:
        raise DataError(
            f"attention_mask_of={attention_mask_of!r} is not among the padded keys {list(fills)}.",
            "The mask tells a sequence's elements from its padding.",
            f"Give {attention_mask_of!r} a fill value.",
        )
    return _Pad({**_KNOWN_FILLS, **fills}, frozenset(fills), multiple_of, attention_mask_of)


@dataclass(frozen=True)
class _Pad:
    fills: Mapping[str, float]
    wanted: frozenset[str]
    multiple_of: int
    attention_mask_of: str | None

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        values = columns(samples)
        if missing := sorted(self.wanted - values.keys()):
            raise DataError(
                f"pad is told about {missing[0]!r}; the samples have {list(values)}.",
                "It pads keys that every sample has.",
                "Correct the key.",
            )
        batch = {
            key: self._pad(key, rows) if self._is_padded(key, rows) else stack(key, rows)
            for key, rows in values.items()
        }
        if self.attention_mask_of is not None:
            if "attention_mask" in batch:
                raise DataError(
                    "The samples have an 'attention_mask' already.",
                    f"attention_mask_of={self.attention_mask_of!r} would replace it.",
                    "Leave attention_mask_of out.",
                )
            ones = [torch.ones(len(row), dtype=torch.int64) for row in values[self.attention_mask_of]]
            batch["attention_mask"] = self._pad("attention_mask", ones)
        return batch

    def _is_padded(self, key: str, rows: Sequence[Tensor]) -> bool:
        # `labels` that the caller did not name may be one number for each sample.
        return key in self.wanted or (key in self.fills and all(row.ndim == 1 for row in rows))

    def _pad(self, key: str, rows: Sequence[Tensor]) -> Tensor:
        check_same_dtype(key, rows)
        for row in rows:
            if row.ndim != 1:
                raise DataError(
                    f"{key!r} of a sample has the shape {tuple(row.shape)}.",
                    "Padding is for sequences, with one dimension.",
                    f"Leave {key!r} out of pad's fill values, or give a `collate` of your own.",
                )
        width = math.ceil(max(len(row) for row in rows) / self.multiple_of) * self.multiple_of
        padded = torch.full((len(rows), width), self.fills[key], dtype=rows[0].dtype)
        for into, row in zip(padded, rows, strict=True):
            into[: len(row)] = row
        return padded
