"""Fetching one micro-batch: from positions of the run to tensors, or to a failure that says which sample it was."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from trimaran.data.collate import Collate, as_batch
from trimaran.data.order import Order
from trimaran.data.randomness import preserved_generators, seed_generators
from trimaran.errors import DataError, TrimaranError
from trimaran.job import Source
from trimaran.layout import Slice
from trimaran.world.mix import derive

# Keeps the randomness of augmentations apart from that of the order, which is derived from the same seed.
_SAMPLE_STREAM = 1


@dataclass(frozen=True)
class Failure:
    """A DataError as a value: it arrives whole from another process, where an exception of three parts does not."""

    value: str
    rule: str
    remedy: str
    traceback: str

    def error(self) -> DataError:
        """The error to raise, with the traceback of where it happened as its note."""
        error = DataError(self.value, self.rule, self.remedy)
        error.add_note(self.traceback)
        return error


@dataclass(frozen=True)
class Fetch(Dataset[dict[str, Tensor] | Failure]):
    """What a loader runs for each micro-batch, in whichever process. Keyed by the positions wanted."""

    source: Source
    collate: Collate
    order: Order

    def __getitem__(self, wanted: Slice) -> dict[str, Tensor] | Failure:
        epochs, ids = self.order.at(np.arange(wanted.start, wanted.stop))
        seeds = derive(_SAMPLE_STREAM, self.order.seed, epochs, ids).tolist()
        samples: list[Any] = []
        with preserved_generators():
            for epoch, sample_id, seed in zip(epochs.tolist(), ids.tolist(), seeds, strict=True):
                seed_generators(seed)
                try:
                    samples.append(self.source[sample_id])
                except Exception as error:
                    return _sample_failure(error, sample_id, epoch)
            # A collate that draws, as one that masks tokens does, goes on from the seed of the last sample.
            try:
                return as_batch(self.collate(samples), len(samples))
            except Exception as error:
                return _collate_failure(error, ids.tolist())


def _sample_failure(error: Exception, sample_id: int, epoch: int) -> Failure:
    if isinstance(error, TrimaranError):
        return Failure(f"Sample {sample_id} of the data: {error.value}", error.rule, error.remedy, _format(error))
    return Failure(
        f"Sample {sample_id} of the data raised {_describe(error)} in epoch {epoch}.",
        "Every sample from 0 to len(data) - 1 can be fetched, as often as it is asked for.",
        f"Try data[{sample_id}], then repair or leave out that sample.",
        _format(error),
    )


def _collate_failure(error: Exception, ids: list[int]) -> Failure:
    if isinstance(error, DataError):
        return Failure(error.value, error.rule, error.remedy, _format(error))
    shown = ", ".join(map(str, ids[:8])) + (", …" if len(ids) > 8 else "")
    return Failure(
        f"The collate raised {_describe(error)} on the samples {shown} of the data.",
        "A collate turns any list of samples into a dict of tensors.",
        f"Try collate([data[i] for i in ({ids[0]}, …)]).",
        _format(error),
    )


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
