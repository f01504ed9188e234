"""The global gradient norm, which counts every parameter once (invariant 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROW = 2**15
"""Elements a CPU sums in one go: torch adds float32 squares in a row there, and is off by 1e-3 at 2e7 elements."""


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients, as a float64 scalar on their device; no host-device copy.

    Gradients must already be summed over the ranks: it is then the same on every rank, and no collective is needed.
    """
    device = gradients[0].device
    in_rows = device.type == "cpu"
    norms = torch._foreach_norm([_row_norms(each) if in_rows and each.numel() > _ROW else each for each in gradients])
    # MPS has no float64; float32 loses nothing that matters to a norm.
    width = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([norm.to(width) for norm in norms]).square().sum().sqrt()


def clip_coefficient(norm: Tensor, clip: float | None) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `clip`: as torch, clip / (norm + 1e-6)."""
    if clip is None:
        return torch.ones_like(norm)
    return torch.clamp(clip / (norm + 1e-6), max=1.0)


def _row_norms(gradient: Tensor) -> Tensor:
    """Norms of equal parts of a gradient and of what is left over; their norm is its norm."""
    flat = gradient.flatten()
    rest = flat.numel() % _ROW
    rows = torch.linalg.vector_norm(flat[: flat.numel() - rest].view(-1, _ROW), dim=1)
    return torch.cat([rows, torch.linalg.vector_norm(flat[flat.numel() - rest :])[None]])
