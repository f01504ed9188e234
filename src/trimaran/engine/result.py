"""The figures of one step, still on their way from the device and from the other ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


class StepResult:
    """What one optimizer step gave. Reading a figure waits for it; the loop reads one step late, when it is there.

    `index` counts steps from 0; `lr` is the job's rate at this step, before what single groups multiply it by. `loss`
    is the global batch's mean loss and `grad_norm` its gradient's norm before clipping, the same on every rank;
    `skipped` tells that the norm was not finite and nothing was updated.
    """

    def __init__(self, *, index: int, lr: float, loss_sum: Tensor, norm: Tensor, work: dist.Work | None) -> None:
        self.index = index
        self.lr = lr
        self._work = work
        self._sources = (loss_sum, norm)
        self._copied: torch.cuda.Event | None = None
        self._figures: tuple[float, float] | None = None
        if loss_sum.is_cuda:
            self._start_copy()

    @property
    def loss(self) -> float:
        return self._read_figures()[0]

    @property
    def grad_norm(self) -> float:
        return self._read_figures()[1]

    @property
    def skipped(self) -> bool:
        return not math.isfinite(self.grad_norm)

    def _start_copy(self) -> None:
        """Queues the copy to the host right behind the figures, so that reading them waits for no later work."""
        if self._work is not None:
            self._work.wait()  # orders the stream, not the host
            self._work = None
        self._sources = tuple(
            torch.empty((), dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True) for each in self._sources
        )  # type: ignore[assignment]
        self._copied = torch.cuda.Event()
        self._copied.record()

    def _read_figures(self) -> tuple[float, float]:
        if self._figures is None:
            if self._work is not None:
                self._work.wait()
            if self._copied is not None:
                self._copied.synchronize()
            loss, norm = self._sources
            self._figures = (loss.item(), norm.item())
        return self._figures
