"""From a list of samples to a batch: stacking, and the contract that every batch keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.errors import DataError
from trimaran.job import Source

Collate = Callable[[list[Any]], Any]

_SAMPLE_RULE = "Without a `collate`, a sample is a dict of tensors, arrays or numbers, with the same keys in each."
_BATCH_RULE = "A batch is a mapping of plain CPU tensors whose first dimension counts its samples."


def choose_collate(source: Source, collate: Collate | None) -> Collate:
    """The job's collate, else the source's own, else `default_collate`."""
    return collate or getattr(source, "collate", None) or default_collate


def default_collate(samples: list[Any]) -> dict[str, Tensor]:
    """Stack samples that are dicts of tensors, arrays, numbers or lists of numbers. Raises DataError for others."""
    return {key: stack(key, values) for key, values in columns(samples).items()}


def columns(samples: Sequence[Any]) -> dict[str, list[Tensor]]:
    """The samples' values by key, as tensors. Raises DataError for samples that are not alike dicts of numbers."""
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise DataError(
                f"A sample is of type {type(sample).__name__}.",
                _SAMPLE_RULE,
                "Give the job collate=f, where f(samples) returns a dict of tensors.",
            )
        if sample.keys() != samples[0].keys():
            raise DataError(
                f"Samples of one micro-batch have the keys {list(samples[0])} and {list(sample)}.",
                _SAMPLE_RULE,
                "Give every sample the same keys, or give the job a `collate`.",
            )
    return {key: [_as_tensor(key, sample[key]) for sample in samples] for key in samples[0]}


def stack(key: str, tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of equal shape [...] and dtype as one [len(tensors), ...]. Raises DataError naming the key."""
    check_same_dtype(key, tensors)
    if len({tensor.shape for tensor in tensors}) > 1:
        raise DataError(
            f"{key!r} has the shapes {_some(tuple(tensor.shape) for tensor in tensors)} in one micro-batch.",
            "Tensors are stacked, for which they must have one shape.",
            f'Pad them: collate=tm.data.pad({{"{key}": FILL_VALUE}}), or give a `collate` of your own.',
        )
    return torch.stack(list(tensors))


def check_same_dtype(key: str, tensors: Sequence[Tensor]) -> None:
    """Raise DataError where dtypes differ: torch would promote them, differently for each cut of a batch."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise DataError(
            f"{key!r} has the dtypes {_some(tensor.dtype for tensor in tensors)} in one micro-batch.",
            "A key has one dtype in all samples.",
            "Convert it where the sample is made.",
        )


def as_batch(batch: Any, num_samples: int) -> dict[str, Tensor]:
    """What a collate returned, as a dict of tensors. Raises DataError unless it keeps the contract of a batch.

    Mappings of any type are taken, such as the BatchEncoding of a tokenizer. `num_samples`: what went in.
    """
    if not isinstance(batch, Mapping) or not batch:
        what = "an empty mapping" if isinstance(batch, Mapping) else f"a value of type {type(batch).__name__}"
        raise DataError(f"The collate returned {what}.", _BATCH_RULE, "Let it return a dict of tensors.")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"{key!r} of a batch is of type {type(value).__name__}.", _BATCH_RULE, "Convert it, or leave it out."
            )
        if value.ndim == 0 or len(value) != num_samples:
            shapes = ", ".join(f"{key!r}: {_shape(value)}" for key, value in batch.items())
            raise DataError(
                f"{key!r} of a batch of {num_samples} samples has the shape {_shape(value)} (all: {shapes}).",
                _BATCH_RULE,
                "Let the collate give every tensor one row for each sample.",
            )
        if value.device.type != "cpu" or value.requires_grad:
            what = "requires a gradient" if value.requires_grad else f"lies on {value.device}"
            raise DataError(f"{key!r} of a batch {what}.", _BATCH_RULE, "Use .detach().cpu() where it is made.")
    return dict(batch)


def _as_tensor(key: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic, int, float, list, tuple)):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f"a {type(value).__name__} that is no tensor ({error})"
    else:
        reason = f"of type {type(value).__name__}"
    raise DataError(
        f"{key!r} of a sample is {reason}.",
        _SAMPLE_RULE,
        f"Drop {key!r} from the samples, or give the job a `collate`.",
    )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _some(values: Any) -> str:
    """The distinct values, the first four of them."""
    distinct = [str(value) for value in dict.fromkeys(values)]
    return ", ".join(distinct[:4]) + (", …" if len(distinct) > 4 else "")
