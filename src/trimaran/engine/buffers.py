"""Running statistics: buffers that a training forward changes, kept equal over the data ranks (invariant 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trimaran.world.groups import World


class RunningBuffers:
    """Replaces the buffers that a step's forwards changed by their mean over the data ranks.

    These are BatchNorm's statistics, and whatever else of the saved buffers changed on any rank: samples may lead
    through different modules, so the ranks agree on which. A rank that did not change a buffer, such as one whose
    micro-batches were all weightless, does not enter its mean. Counters (integer buffers) become the largest.
    Buffers that are not saved with the model (persistent=False) are caches, and each rank's own.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._group = world.group("dp")
        # BatchNorm's kernel does not count versions; that it ran is told by its mode, which all ranks share.
        self._norms = [each for each in model.modules() if isinstance(each, _NormBase) and each.track_running_stats]
        self._watched = [
            _Watched(module, name)
            for module in model.modules()
            if module not in self._norms
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._had_samples = True
        self._changed: list[bool] = []
        self._num_changed = torch.zeros(0)
        self._agreement: dist.Work | None = None

    def begin_step(self) -> None:
        """Notes the state of every buffer."""
        if self._group is not None:
            for each in self._watched:
                each.note()

    def compare(self, *, had_samples: bool) -> None:
        """After the last backward: starts to agree on what changed since `begin_step`. Every rank must call it."""
        self._had_samples = had_samples
        if self._group is not None and self._watched:
            self._changed = [each.has_changed() and had_samples for each in self._watched]
            self._num_changed = torch.tensor(self._changed, dtype=torch.float64)
            self._agreement = self._world.agree_later(self._num_changed)

    def finish_step(self) -> None:
        """Averages what changed. Every rank must call it, after `compare`."""
        if self._group is None:
            return
        entries = [
            (buffer, self._had_samples)
            for module in self._norms
            if module.training
            for buffer in module.buffers(recurse=False)
        ]
        entries += [
            (each.current, changed)
            for each, changed, anywhere in zip(self._watched, self._changed, self._read_changed_anywhere(), strict=True)
            if anywhere
        ]
        _average([entry for entry in entries if _is_real(entry[0])], self._group)
        _take_largest([buffer for buffer, _ in entries if not _is_real(buffer)], self._group)

    def _read_changed_anywhere(self) -> list[bool]:
        if self._agreement is not None:
            self._agreement.wait()
        return [num_ranks > 0 for num_ranks in self._num_changed.tolist()]  # on the CPU


class _Watched:
    """A buffer that may be a running one. In the first step its value is compared, later only its version.

    A write through `.data` counts no version; a buffer so written in the first step is taken to change in each.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        self._seen: Tensor | None = None
        self._version = 0
        self._value: Tensor | None = None
        self._is_hidden: bool | None = None

    @property
    def current(self) -> Tensor:
        return self._module.get_buffer(self._name)

    def note(self) -> None:
        self._seen, self._version = self.current, self.current._version
        self._value = self._seen.clone() if self._is_hidden is None else None

    def has_changed(self) -> bool:
        counted = self.current is not self._seen or self.current._version != self._version
        if self._value is not None:
            self._is_hidden = not counted and not torch.equal(self.current, self._value)
            self._value = None
        return counted or bool(self._is_hidden)


def _is_real(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _average(entries: Sequence[tuple[Tensor, bool]], group: dist.ProcessGroup) -> None:
    """Each buffer becomes its mean over the ranks on which it enters; on one of them at least it must."""
    if not entries:
        return
    buffers = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer, _ in entries]
    width = torch.float32 if buffers[0].device.type == "mps" else torch.float64
    values = [
        buffer.flatten().to(width) if enters else torch.zeros(buffer.numel(), dtype=width, device=buffer.device)
        for buffer, (_, enters) in zip(buffers, entries, strict=True)
    ]
    counts = torch.tensor([enters for _, enters in entries], dtype=width, device=buffers[0].device)
    flat = torch.cat([*values, counts])
    dist.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(buffer.numel() for buffer in buffers), len(buffers)])
    for buffer, total, count in zip(buffers, sums, counts, strict=True):
        buffer.copy_((total / count).view(buffer.shape))


def _take_largest(counters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if not counters:
        return
    flat = torch.cat([counter.flatten().to(torch.int64) for counter in counters])
    dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    for counter, largest in zip(counters, flat.split([counter.numel() for counter in counters]), strict=True):
        counter.copy_(largest.view(counter.shape))


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, every buffer of the model has its old value after it.

    A forward and its backward both belong inside. A buffer that was replaced by another is put back, unless it is not
    saved with the model: then it is a cache, which the module may have noted the size of.
    """
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            # Through .data, so that it does not count as a change.
            buffer.data.copy_(value)
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer
