"""Losses of regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.errors import LossError
from trimaran.losses.checks import check_key
from trimaran.losses.reading import logits_of, tensor_of

if TYPE_CHECKING:
    from trimaran.job import Batch


@dataclass(frozen=True)
class mse:
    """Squared error over outputs and targets of one shape, whatever it is; the weight is the number of elements.

    Raises LossError where the shapes differ: nothing is broadcast.
    """

    target: str = "target"

    def __post_init__(self) -> None:
        check_key("mse", "target", self.target)

    def weight(self, batch: Batch, /) -> Tensor:
        """How many elements the target has, as a float64 scalar."""
        return torch.tensor(tensor_of(batch, self.target, "mse").numel(), dtype=torch.float64)

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """The summed squared error, a scalar with its graph, in the output's precision and at least float32."""
        predicted = logits_of(output, "mse")
        target = tensor_of(batch, self.target, "mse")
        if predicted.shape != target.shape:
            raise LossError(
                f"mse got an output of shape {list(predicted.shape)} and batch[{self.target!r}] of "
                f"{list(target.shape)}.",
                "Both have one shape: [N] against [N, 1] would be broadcast to all N × N pairs.",
                "Squeeze or reshape one of them.",
            )
        return F.mse_loss(predicted, target.to(predicted.dtype), reduction="sum")
