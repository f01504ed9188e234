"""Which box of which tensor a rank holds, and which of the ranks that hold the same one writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trimaran.errors import CheckpointError
from trimaran.tensor_plan import DealtRows
from trimaran.world.groups import World
from trimaran.world.place import CUTTING_AXES

_LARGEST_PIECE_BYTES = 2**26


@dataclass(frozen=True)
class Part:
    """A box of a tensor that this rank holds: `local` are its numbers, `offset` is where they begin in the whole.

    `holders` are the ranks that hold the same box, in order. Complex numbers are seen as pairs of real ones.
    """

    name: str
    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_complex: bool
    holders: tuple[int, ...]

    @property
    def key(self) -> str:
        """The name of these numbers in a file."""
        if tuple(self.local.shape) == self.shape:
            return self.name
        return f"{self.name}[{','.join(map(str, self.offset))}]"


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor as it is saved: over all ranks, and with complex numbers as pairs."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's numbers of a tensor, with pairs for complex ones, and where they begin in the whole."""
    offset: tuple[int, ...] = (0,) * tensor.dim()
    local = tensor
    if isinstance(tensor, DTensor):
        if any(each.is_partial() for each in tensor.placements):
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} is a sum that is still pending ({tensor.placements}).",
                "A checkpoint holds whole numbers of each rank.",
                "Redistribute it before it becomes part of the model's or the optimizer's state.",
            )
        if not _is_box(tensor):
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} lies on the ranks in rows that do not follow each other "
                f"({tensor.placements}).",
                "A checkpoint holds boxes of a tensor.",
                "Cut it in another way, or redistribute it before it becomes part of the state.",
            )
        _, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local, offset = tensor.to_local(), tuple(starts)
    if local.is_complex():
        return torch.view_as_real(local.detach()), (*offset, 0)
    return local.detach(), offset


def rows_in_order(local: Tensor, offset: tuple[int, ...], order: DealtRows | None) -> Iterator[tuple[Tensor, Any]]:
    """A rank's numbers and where they begin in the whole; where rows were dealt in an `order`, run by run."""
    if order is None or not local.dim():
        yield local, offset
        return
    for at, start, count in order.runs(offset[0], offset[0] + local.shape[0]):
        yield local[at : at + count], (start, *offset[1:])


def parts_to_write(
    tensors: Mapping[str, Tensor], world: World, orders: Mapping[str, DealtRows] | None = None
) -> list[Part]:
    """The parts of these tensors that this rank writes, so that each is written once and all write alike much.

    `orders` are those in which tensors' rows lie on the ranks, where they are not the model's.

    Needs no other rank: those that hold the same box see the same parts in the same order, and deal them alike.
    """
    holders = cache(world.ranks_beside)  # a question to the mesh takes a millisecond
    held = [
        piece
        for name, tensor in tensors.items()
        for part in _parts(name, tensor, (orders or {}).get(name), holders)
        for piece in _cut(part)
    ]
    load: dict[tuple[int, ...], dict[int, int]] = {}
    chosen: dict[int, int] = {}
    # Largest first to whoever has least so far.
    for index in sorted(range(len(held)), key=lambda each: (-held[each].local.nbytes, each)):
        part = held[index]
        loads = load.setdefault(part.holders, dict.fromkeys(part.holders, 0))
        writer = min(loads, key=lambda rank: (loads[rank], rank))
        loads[writer] += part.local.nbytes
        chosen[index] = writer
    return [part for index, part in enumerate(held) if chosen[index] == world.rank]


def _parts(
    name: str, tensor: Tensor, order: DealtRows | None, holders: Callable[[frozenset[str]], tuple[int, ...]]
) -> Iterator[Part]:
    axes = sharded_axes(tensor)
    for local, offset in rows_in_order(*local_part(tensor), order):
        yield Part(name, local, offset, whole_shape(tensor), tensor.is_complex(), holders(axes))


def sharded_axes(tensor: Tensor) -> frozenset[str]:
    """The axes along which ranks hold different boxes of the tensor."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    axes = {name for name, each in zip(names, tensor.placements, strict=True) if _cuts(each)}
    assert axes <= set(CUTTING_AXES), f"{axes} are no axes of a run's mesh"
    return frozenset(axes)


def _cuts(placement: Placement) -> TypeGuard[Shard | _StridedShard]:
    # FSDP2 over tensor parallelism gives the second kind, whose is_shard() is False.
    return isinstance(placement, Shard | _StridedShard)


def _is_box(tensor: DTensor) -> bool:
    """Whether a rank's rows follow each other: with strided ones, where the later axes cut each stride once."""
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            later = [
                tensor.device_mesh.size(axis + 1 + index)
                for index, each in enumerate(tensor.placements[axis + 1 :])
                if _cuts(each) and each.dim == placement.dim
            ]
            if math.prod(later) != placement.split_factor:
                return False
    return True


def _cut(part: Part) -> Iterable[Part]:
    """A large part that several hold, in pieces along its first dim, so that they share the writing."""
    local = part.local
    rows = local.shape[0] if local.dim() else 1
    count = min(len(part.holders), rows, -(-local.nbytes // _LARGEST_PIECE_BYTES))
    if count <= 1:
        yield part
        return
    start = 0
    for piece in local.tensor_split(count):
        yield replace(part, local=piece, offset=(part.offset[0] + start, *part.offset[1:]))
        start += piece.shape[0]
