"""Loss and metrics as totals and weights, summed wherever the samples lie (invariant 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.job import Loss


def measure(measures: Iterable[Loss], output: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Row 0: each measure's total on this micro-batch, row 1: its weight; float64 where the device has it."""
    rows = [(each.total(output, tensors).detach(), each.weight(tensors)) for each in measures]
    width = torch.float32 if rows[0][0].device.type == "mps" else torch.float64
    device = rows[0][0].device
    return torch.stack(
        [torch.stack([value.to(device, width) for value in column]) for column in zip(*rows, strict=True)]
    )


def read_means(names: Iterable[str], sums: Tensor) -> dict[str, float]:
    """Name -> total / weight, not-a-number where nothing had a weight. One copy from the device."""
    totals, weights = sums.tolist()
    return {
        name: total / weight if weight else float("nan")
        for name, total, weight in zip(names, totals, weights, strict=True)
    }


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside; each back in its own mode after, frozen parts included.

    Sets the modes themselves: a train() of the user's own may do more, such as merging weights, and not undo it.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
