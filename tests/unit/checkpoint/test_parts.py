"""Who writes which box: every number once, all ranks alike much, whatever the cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from trimaran.checkpoint import parts as module
from trimaran.checkpoint.parts import local_part, parts_to_write, whole_shape
from trimaran.errors import CheckpointError
from trimaran.layout import Layout
from trimaran.records import PartRecord, TensorRecord
from trimaran.records.checkpoints import find_gap
from trimaran.world.groups import join_default_group

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Replicas:
    """A world in which all ranks hold the same, as far as parts look at it."""

    rank: int
    size: int
    asked: list[frozenset[str]] = field(default_factory=list)

    def ranks_beside(self, axes: frozenset[str]) -> tuple[int, ...]:
        assert not axes
        self.asked.append(axes)
        return tuple(range(self.size))


def written_by(rank: int, size: int, tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, Any, Any]]:
    world: Any = Replicas(rank, size)
    return [(part.name, part.key, part.offset, tuple(part.local.shape)) for part in parts_to_write(tensors, world)]


def assert_written_once(tensors: dict[str, Any], of_ranks: list[list[tuple[str, str, Any, Any]]]) -> None:
    """The boxes of all ranks fill every tensor exactly, and no rank has two under one key."""
    for written in of_ranks:
        keys = [key for _, key, _, _ in written]
        assert len(keys) == len(set(keys))
    for name, tensor in tensors.items():
        boxes = [
            PartRecord("f", key, offset, shape) for each in of_ranks for n, key, offset, shape in each if n == name
        ]
        assert find_gap(TensorRecord("F32", whole_shape(tensor), tuple(boxes))) is None, name


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8), st.integers(1, 5), st.integers(1, 60))
def test_replicas_share_the_writing(shapes: list[list[int]], size: int, piece: int) -> None:
    tensors = {f"t{index}": torch.zeros(shape) for index, shape in enumerate(shapes)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_LARGEST_PIECE_BYTES", piece)
        of_ranks = [written_by(rank, size, tensors) for rank in range(size)]
    assert_written_once(tensors, of_ranks)
    loads = [sum(4 * math.prod(shape) for *_, shape in each) for each in of_ranks]
    rows = [4 * math.prod(shape[1:]) for shape in shapes]
    # Largest first to whoever has least: nobody is ahead by more than one piece.
    assert max(loads) - min(loads) <= max((max(piece + row, row) for row in rows), default=0)


def test_a_large_tensor_is_cut_into_pieces_that_all_write() -> None:
    tensors = {"large": torch.zeros(2**26 // 4 + 1024, 2)}
    of_ranks = [written_by(rank, 2, tensors) for rank in range(2)]
    assert [len(each) for each in of_ranks] == [1, 1]
    assert of_ranks[0][0][1] == "large[0,0]"
    assert_written_once(tensors, of_ranks)
    assert written_by(0, 1, tensors)[0][1] == "large"  # alone it is one piece


def test_the_mesh_is_asked_once_and_not_for_every_tensor() -> None:
    world: Any = Replicas(0, 2)
    assert len(parts_to_write({str(index): torch.zeros(2) for index in range(50)}, world)) == 25
    assert len(world.asked) == 1


def test_complex_numbers_are_pairs() -> None:
    tensor = torch.randn(3, 2, dtype=torch.complex64)
    local, offset = local_part(tensor)
    assert (local.shape, offset, whole_shape(tensor)) == ((3, 2, 2), (0, 0, 0), (3, 2, 2))
    local[0, 0, 1] = 7.0
    assert tensor[0, 0].imag == 7.0  # seen, not copied


def cut_everywhere(placements: list[list[Placement]]) -> list[Any]:
    """On each rank: what it writes of tensors cut in these ways, with the numbers."""
    world = join_default_group(Layout().resolve(world_size=2, global_batch=8), CPU)
    assert world.mesh is not None
    mesh = world.mesh["dp"]
    tensors: dict[str, torch.Tensor] = {}
    for index, each in enumerate(placements):
        for shape in ((5, 3), (1, 4), (4, 2)):
            whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
            tensors[f"{index} {shape}"] = distribute_tensor(whole, mesh, each)
    tensors["plain"] = torch.arange(6.0)
    tensors["complex"] = distribute_tensor(torch.ones(3, 2, dtype=torch.complex64), mesh, [Shard(0)])
    parts = parts_to_write(tensors, world)
    shapes = {name: whole_shape(each) for name, each in tensors.items()}
    return [
        shapes,
        [(part.name, part.key, part.offset, part.local.tolist(), tuple(part.local.shape)) for part in parts],
    ]


def test_cut_tensors_are_written_once_each_number_at_its_place(pool: Any) -> None:
    placements = [[Shard(0)], [Shard(1)], [Replicate()]]
    of_ranks = pool.run(cut_everywhere, 2, placements)
    shapes = of_ranks[0][0]
    for name, shape in shapes.items():
        boxes = []
        for _, written in of_ranks:
            for part, key, offset, values, local in written:
                if part != name:
                    continue
                boxes.append(PartRecord("f", key, offset, local))
                if name != "complex":
                    whole = torch.arange(float(math.prod(shape))).reshape(shape)
                    place = tuple(slice(start, start + size) for start, size in zip(offset, local, strict=True))
                    assert torch.equal(torch.tensor(values).reshape(local), whole[place]), key
        assert find_gap(TensorRecord("F32", shape, tuple(boxes))) is None, name


def pending_sum() -> str:
    world = join_default_group(Layout().resolve(world_size=2, global_batch=8), CPU)
    assert world.mesh is not None
    tensor = DTensor.from_local(torch.ones(2), world.mesh["dp"], [Partial()])
    with pytest.raises(CheckpointError) as caught:
        parts_to_write({"t": tensor}, world)
    return caught.value.value


def test_a_pending_sum_is_refused(pool: Any) -> None:
    for said in pool.run(pending_sum, 2):
        assert "is a sum that is still pending" in said
