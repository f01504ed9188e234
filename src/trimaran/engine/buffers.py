"""Running statistics: buffers that a training forward changes, kept equal over the data ranks (invariant 10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class RunningBuffers:
    """Finds the buffers a step's forwards changed and replaces them by their mean over the data ranks.

    A rank whose step had only weightless micro-batches has nothing to say and does not enter the mean. Counters
    (integer buffers) become the largest. Which buffers changed is seen from torch's version counters, and is the
    same on all ranks, since all run the same number of forwards.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._model = model
        self._group = group
        # Batch statistics are written inside a kernel that does not count versions.
        self._always = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for name, _ in module.named_buffers(recurse=False)
        }
        self._versions: dict[str, tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Notes the state of every buffer."""
        self._versions = self._state()

    def finish_step(self, *, had_samples: bool) -> None:
        """Averages what changed since `begin_step`. Every data rank must call it."""
        if self._group is None:
            return
        before, now = self._versions, self._state()
        buffers = dict(self._model.named_buffers())
        changed = [buffers[name] for name in buffers if name in self._always or before.get(name) != now[name]]
        floats = [buffer for buffer in changed if buffer.is_floating_point()]
        if floats:
            self._average(floats, had_samples)
        for counter in changed:
            if not counter.is_floating_point():
                dist.all_reduce(counter, op=dist.ReduceOp.MAX, group=self._group)

    def _average(self, buffers: list[Tensor], had_samples: bool) -> None:
        width = torch.float32 if buffers[0].device.type == "mps" else torch.float64
        share = 1.0 if had_samples else 0.0
        flat = torch.cat([buffer.detach().flatten().to(width) for buffer in buffers]) * share
        flat = torch.cat([flat, flat.new_full((1,), share)])
        dist.all_reduce(flat, group=self._group)
        parts = (flat[:-1] / flat[-1]).split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))

    def _state(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, every buffer of the model has its old value after it."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
