"""The global gradient norm, which counts every parameter once (invariant 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 2**15
"""Elements summed in one go on a CPU, where torch adds float32 squares up in a row: off by 1e-3 at 2e7 elements."""


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients, as a float64 scalar on their device; no host-device copy.

    Gradients must already be summed over the ranks: it is then the same on every rank, and no collective is needed.
    """
    device = gradients[0].device
    pieces = list(gradients)
    if device.type == "cpu":
        pieces = [piece for each in gradients for piece in _split(each)]
    norms = torch._foreach_norm(pieces)
    # MPS has no float64; float32 loses nothing that matters to a norm.
    width = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([norm.to(width) for norm in norms]).square().sum().sqrt()


def clip_coefficient(norm: Tensor, clip: float | None) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `clip`: as torch, clip / (norm + 1e-6)."""
    if clip is None:
        return torch.ones_like(norm)
    return torch.clamp(clip / (norm + 1e-6), max=1.0)


def _split(gradient: Tensor) -> Sequence[Tensor]:
    if gradient.numel() <= _PIECE:
        return (gradient,)
    return gradient.flatten().tensor_split(-(-gradient.numel() // _PIECE))
