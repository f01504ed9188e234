"""Host memory that is kept for copies of what a rank saves, so that training goes on while they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.checkpoint.parts import Part


class Staging:
    """Buffers for the parts a rank writes, allocated once and filled again at each save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def missing_bytes(self, parts: Sequence[Part]) -> int:
        """The memory that these parts need beyond what is already held."""
        return sum(part.local.nbytes for part in parts if not _fits(self._buffers.get(part.key), part.local))

    def copy(self, parts: Sequence[Part]) -> list[Tensor]:
        """Copies of the parts on the host, complete when this returns; they last until the next call."""
        kept: dict[str, Tensor] = {}
        devices = set()
        for part in parts:
            buffer = self._buffers.pop(part.key, None)
            if buffer is None or not _fits(buffer, part.local):
                pinned = part.local.device.type == "cuda"
                buffer = torch.empty(part.local.shape, dtype=part.local.dtype, pin_memory=pinned)
            # Plain memory order: a strided parameter is written as its numbers follow each other.
            buffer.copy_(part.local, non_blocking=True)
            kept[part.key] = buffer
            devices.add(part.local.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._buffers = kept
        return [kept[part.key] for part in parts]

    def release(self) -> None:
        """Gives the memory back."""
        self._buffers.clear()


def _fits(buffer: Tensor | None, local: Tensor) -> bool:
    return buffer is not None and buffer.shape == local.shape and buffer.dtype == local.dtype
