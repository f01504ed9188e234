"""Which data is this? A digest that a run keeps, so that it is not continued on other data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.data.randomness import preserved_generators, seed_generators
from trimaran.errors import DataError
from trimaran.job import Source

_NUM_PROBES = 8


def fingerprint(source: Source) -> str:
    """A digest of the source's content, equal in every process: its own, Hugging Face's, or one of a few samples.

    The last sees the length and eight samples spread over the source, so it tells another data set and not every
    edit of one. Raises DataError naming a sample that cannot be fetched.
    """
    own = getattr(source, "fingerprint", None)
    if callable(own):
        return str(own())
    hugging_face = getattr(source, "_fingerprint", None)
    if isinstance(hugging_face, str):
        return hugging_face
    return _digest_of_samples(source)


def _digest_of_samples(source: Source) -> str:
    num_samples = len(source)
    digest = hashlib.sha256(str(num_samples).encode())
    with preserved_generators():
        for index in (
            sorted({num_samples * probe // _NUM_PROBES for probe in range(_NUM_PROBES)}) if num_samples else ()
        ):
            seed_generators(index)
            try:
                sample = source[index]
            except Exception as error:
                raise DataError(
                    f"Sample {index} of the data raised {type(error).__name__}: {error}",
                    f"Every sample from 0 to {num_samples - 1} can be fetched.",
                    f"Try data[{index}], then repair or leave out that sample.",
                ) from error
            _feed(digest, sample)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Add a sample to the digest: its numbers and texts, and for anything else only its type."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, (np.ndarray, np.generic)):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes() if value.dtype.kind != "O" else repr(value.tolist()).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, (str, bytes, int, float, bool)):
        digest.update(repr(value).encode())
