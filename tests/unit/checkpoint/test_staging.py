"""Copies on the host: true at the moment of the copy, and their memory allocated once."""

from __future__ import annotations

import torch

from trimaran.checkpoint.parts import Part
from trimaran.checkpoint.staging import Staging


def part(name: str, local: torch.Tensor) -> Part:
    return Part(name, local, (0,) * local.dim(), tuple(local.shape), False, (0,))


def test_a_copy_is_what_was_there_when_it_was_made() -> None:
    live = torch.arange(6.0)
    staging = Staging()
    (copy,) = staging.copy([part("a", live)])
    live.add_(1)
    assert torch.equal(copy, torch.arange(6.0))


def test_memory_is_allocated_once_and_filled_again() -> None:
    live = [torch.ones(4), torch.ones(2, 3).t()]
    parts = [part("a", live[0]), part("b", live[1])]
    staging = Staging()
    assert staging.missing_bytes(parts) == 4 * 4 + 6 * 4
    first = staging.copy(parts)
    assert staging.missing_bytes(parts) == 0
    live[0].fill_(5)
    second = staging.copy(parts)
    assert [each.data_ptr() for each in first] == [each.data_ptr() for each in second]
    assert torch.equal(second[0], torch.full((4,), 5.0))
    assert second[1].is_contiguous()  # written in the order of its numbers
    assert torch.equal(second[1], live[1])


def test_what_has_changed_is_counted_and_what_is_gone_is_freed() -> None:
    staging = Staging()
    staging.copy([part("a", torch.ones(4)), part("b", torch.ones(4)), part("c", torch.ones(4))])
    parts = [part("a", torch.ones(4)), part("b", torch.ones(8)), part("c", torch.ones(4).int())]
    assert staging.missing_bytes(parts) == 8 * 4 + 4 * 4
    staging.copy(parts[:2])
    assert staging.missing_bytes(parts) == 4 * 4
    staging.release()
    assert staging.missing_bytes(parts) == 4 * 4 + 8 * 4 + 4 * 4


def test_numbers_of_any_kind_are_copied_bit_for_bit() -> None:
    tensors = [torch.tensor([float("nan"), -0.0]), torch.tensor([True]), torch.empty(0, 2), torch.tensor(3).bfloat16()]
    copies = Staging().copy([part(str(index), each) for index, each in enumerate(tensors)])
    for copy, live in zip(copies, tensors, strict=True):
        assert copy.dtype == live.dtype
        assert torch.equal(copy.reshape(-1).view(torch.uint8), live.reshape(-1).view(torch.uint8))
