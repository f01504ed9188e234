"""Replicated data parallelism: gradients summed over the ranks in fixed flat buckets, once per step.

Not torch's DDP: it rebuilds its buckets after the first step, so that a step after a restart differs in its last
bits from the same step of an undisturbed run (docs/decisions/0002).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trimaran.engine.local import local_tensor, with_local
from trimaran.errors import JobError

BUCKET_BYTES = 8 * 2**20
"""Large enough that a collective's latency does not matter, small enough that the first starts early."""


@dataclass
class Bucket:
    """Parameters whose gradients lie one behind another in `flat`; `views[i]` is where that of `parameters[i]` lies."""

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    arrived: set[int] = field(default_factory=set)
    work: dist.Work | None = None


class Replicas:
    """Sums gradients over a group of ranks that hold the same parameters and see different samples.

    Buckets follow the parameters' reverse order, in which a backward tends to produce gradients, and never change.
    During the last micro-batch's backward each is reduced as soon as it and all before it are complete, so that
    every rank starts the same collectives in the same order, whatever its samples made the model do.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self.buckets = [_build_bucket(part) for part in _split_into_buckets(parameters)]
        self._last_micro_batch = False
        self._num_started = 0
        self._hooks: list[RemovableHandle] = []
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self._on_gradient, bucket, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def begin_step(self) -> None:
        """Drops the gradients of the step before. The first micro-batch then overwrites, so nothing is zeroed."""
        self._last_micro_batch = False
        self._num_started = 0
        for bucket in self.buckets:
            bucket.work = None
            bucket.arrived.clear()
            for parameter in bucket.parameters:
                parameter.grad = None

    def begin_micro_batch(self, *, last: bool) -> None:
        """Call before each forward; says whether this backward completes the step's gradients."""
        self._last_micro_batch = last
        for bucket in self.buckets:
            bucket.arrived.clear()

    def finish_step(self) -> None:
        """Starts what has not started, waits for all; every gradient is then the sum over the group.

        A parameter that no sample of the step used has a gradient of zero.
        """
        self._last_micro_batch = False  # a backward between steps is nobody's business but the caller's
        for bucket in self.buckets[self._num_started :]:
            self._reduce(bucket)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        view, gradient = bucket.views[index], parameter.grad
        if gradient is None:
            return
        refuse_sparse(gradient)
        numbers = local_tensor(gradient)
        if numbers.data_ptr() != view.data_ptr():
            view.copy_(numbers)
            parameter.grad = with_local(gradient, view)
        if not self._last_micro_batch:
            return
        if bucket.work is not None:
            raise JobError(
                f"a parameter of shape {tuple(parameter.shape)} received gradients twice in one backward.",
                "A gradient is summed over the ranks as soon as it is complete.",
                "Use checkpoint(..., use_reentrant=False) where blocks share parameters.",
            )
        bucket.arrived.add(index)
        while self._num_started < len(self.buckets) and self._is_complete(self.buckets[self._num_started]):
            self._reduce(self.buckets[self._num_started])
            self._num_started += 1

    @staticmethod
    def _is_complete(bucket: Bucket) -> bool:
        return len(bucket.arrived) == len(bucket.parameters)

    def _reduce(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:
                parameter.grad = with_local(parameter, view.zero_())
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)


def _split_into_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        if not buckets or size >= BUCKET_BYTES or kind != (buckets[-1][0].dtype, buckets[-1][0].device):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += local_tensor(parameter).numel() * parameter.element_size()
    return buckets


def _build_bucket(parameters: list[nn.Parameter]) -> Bucket:
    first = parameters[0]
    local = [local_tensor(each) for each in parameters]
    flat = torch.zeros(sum(each.numel() for each in local), dtype=first.dtype, device=first.device)
    pieces = flat.split([each.numel() for each in local])
    # In the parameter's own strides (channels_last, transposed): fused optimizers go through memory side by side.
    views = [piece.as_strided(each.shape, each.stride()) for piece, each in zip(pieces, local, strict=True)]
    return Bucket(parameters, flat, views)


def refuse_sparse(gradient: Tensor) -> None:
    """Raises JobError for a gradient that is not dense."""
    if gradient.layout is not torch.strided:
        raise JobError(
            f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient.",
            "Gradients are summed over the ranks as dense tensors.",
            "Build the embedding with sparse=False.",
        )
