"""The global gradient norm, which counts every parameter once (invariant 5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from trimaran.world.groups import World

_ROW = 2**15
"""Elements a CPU sums in one go: torch adds float32 squares in a row there, and is off by 1e-3 at 2e7 elements."""


def counts_here(parameter: Tensor, world: World, axes: Sequence[str]) -> bool:
    """Whether this rank is the one that counts what it holds of a parameter: the first of those that hold the same.

    `axes` are those over which the squares are summed.
    """
    cut: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        placements = zip(names, parameter.placements, strict=True)
        cut = {name for name, placement in placements if isinstance(placement, Shard | _StridedShard)}
    return all(getattr(world.place, axis) == 0 for axis in axes if axis not in cut)


def global_norm(
    gradients: Sequence[Tensor], groups: Sequence[dist.ProcessGroup] = (), *, device: torch.device
) -> Tensor:
    """L2 norm over all gradients, as a float64 scalar on `device`; no host-device copy.

    Gradients, plain tensors, must already be summed over the data ranks. Where every rank holds all of them it is then
    the same on every rank, and no collective is needed. Where parameters are cut, `gradients` are those that this rank
    counts, and `groups` are what the squares are summed over, one after the other; every rank must call it.
    """
    square = _sum_of_squares(gradients, device)
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def _sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    # MPS has no float64; float32 loses nothing that matters to a norm.
    width = torch.float32 if device.type == "mps" else torch.float64
    gradients = [each for each in gradients if each.numel()]
    if not gradients:
        return torch.zeros((), dtype=width, device=device)
    in_rows = device.type == "cpu"
    norms = torch._foreach_norm([_row_norms(each) if in_rows and each.numel() > _ROW else each for each in gradients])
    return torch.stack([norm.to(width) for norm in norms]).square().sum()


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
