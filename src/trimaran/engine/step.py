"""The engine: one optimizer step of the global batch, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.batch import MicroBatch, RankBatch
from trimaran.engine.buffers import RunningBuffers, unchanged_buffers
from trimaran.engine.local import local_tensor
from trimaran.engine.measure import evaluation_mode, measure, read_means
from trimaran.engine.norm import clip_coefficient, counts_here, global_norm
from trimaran.engine.precision import LossScale, forward_context, parameter_dtype, upcast_output
from trimaran.engine.replicas import Replicas, refuse_sparse
from trimaran.engine.result import StepResult
from trimaran.engine.shard import Shards
from trimaran.engine.tensor import TensorParallel
from trimaran.engine.update import apply_update
from trimaran.errors import JobError
from trimaran.job import Loss
from trimaran.layout import Precision
from trimaran.phases import Phases
from trimaran.world.groups import World
from trimaran.world.rng import derive_seed, seed_forward

_EVALUATION = -1
"""Stands for the step where a seed is derived for an evaluation, which is the same whenever it takes place."""


@dataclass(frozen=True)
class _Accumulated:
    """A global batch whose gradients wait for `update`; `work` is what adds up `sums` over the ranks.

    These are the loss and, where groups of parameters are gathered, their order on each rank and its square.
    """

    index: int
    weight: float
    sums: Tensor
    work: dist.Work | None


class Engine:
    """Trains one model: `step(batch)` = `accumulate(batch)` + `update()`. Every rank calls the same methods.

    `model` is the module itself, on `world.device`, with its weights in place; `parallelize.build_engine` makes both.
    The hot path reads nothing back from the device; a step's figures wait in the `StepResult`.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        world: World,
        precision: Precision,
        loss: Loss,
        metrics: Mapping[str, Loss],
        inputs: Mapping[str, str],
        optimizer: torch.optim.Optimizer,
        updated: Mapping[str, nn.Parameter],
        shards: Shards | None,
        tensor: TensorParallel | None,
        lr: float,
        lr_factor: Callable[[int], float],
        clip: float | None,
        seed: int,
        phases: Phases,
    ) -> None:
        self.model = model
        self.world = world
        self.precision = precision
        self.loss = loss
        self.optimizer = optimizer
        self.num_updates = 0
        self.lr_factor = lr_factor
        """The schedule: what update k, counted from 0, multiplies every group's rate by."""
        self.loss_scale = LossScale() if precision == "fp16" else None
        self.phases = phases
        self._measures = {"loss": loss, **metrics}
        self._inputs = inputs
        self._lr = lr
        self._clip = clip
        self._seed = seed
        self._dtype = parameter_dtype(precision)
        # MPS has no float64.
        self._sum_dtype = torch.float32 if world.device.type == "mps" else torch.float64
        self._data_group = world.group("dp")
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(trained.values())
        self.updated = updated
        """Name -> what the optimizer holds of a parameter: itself, or this rank's numbers of it, in the same memory."""
        self._updated = [updated[name] for name in trained]
        self._shards = shards
        self._tensor = tensor
        self.dealt = {} if tensor is None else tensor.dealt
        """Name of a parameter -> the order in which its rows lie on the ranks, where that is not the model's."""
        whole = self._parameters if shards is None else [each for each in self._parameters if each in shards.uncut]
        self._replicas = Replicas(whole, self._data_group) if self._data_group is not None and whole else None
        axes = [*(["replicate", "shard"] if shards is not None else []), *(["tp"] if tensor is not None else [])]
        self._counted = [counts_here(parameter, world, axes) for parameter in self._parameters]
        groups = [self._data_group if shards is not None else None, world.group("tp") if tensor is not None else None]
        self._norm_groups = [group for group in groups if group is not None]
        self._buffers = RunningBuffers(model, world)
        self._accumulated: _Accumulated | None = None
        self._unsettled: StepResult | None = None
        self._orders = torch.zeros(0)
        self.last_result: StepResult | None = None
        for group in optimizer.param_groups:
            group.setdefault("base_lr", group["lr"])

    def step(self, batch: RankBatch) -> StepResult:
        """One optimizer step on this rank's share of a global batch."""
        self.accumulate(batch)
        return self.update()

    def accumulate(self, batch: RankBatch) -> None:
        """Leaves in every `parameter.grad` the gradient of the global batch's loss, summed over the data ranks.

        The loss is the sum over the global batch divided by its total weight; in fp16 the gradient is multiplied by
        the loss scale. A parameter that no sample used has a gradient of zero. Micro-batches run in the batch's order.
        """
        if self._accumulated is not None:
            raise JobError(
                "accumulate() was called twice without an update().",
                "One call takes a whole global batch; its micro-batches are inside.",
                "Call update() after each accumulate().",
            )
        if self.loss_scale is not None:
            self._settle_previous()  # whether the scale grows or shrinks decides this step's gradients
        weight = batch.total_weight if batch.total_weight is not None else self.agree_on_weight(batch)
        scale = self.loss_scale.value if self.loss_scale else 1.0
        factor = scale / weight if weight else float("nan")  # a batch of no weight has no mean
        self.drop_gradients()
        self._buffers.begin_step()
        loss_sum = torch.zeros((), dtype=self._sum_dtype, device=self.world.device)
        for index, micro_batch in enumerate(batch.micro_batches):
            is_last = index == len(batch.micro_batches) - 1
            for part in (self._replicas, self._shards):
                if part is not None:
                    part.begin_micro_batch(last=is_last)
            loss_sum += self._run_micro_batch(batch.index, micro_batch, 0.0 if micro_batch.weightless else factor)
        loss_sum /= scale
        with self.phases("synchronize"):
            self._buffers.compare(had_samples=not all(each.weightless for each in batch.micro_batches))
            self._complete_gradients()
            self._buffers.finish_step()
            sums = loss_sum[None]
            if self._shards is not None:
                order = self._shards.take_order()
                sums = torch.cat([sums, sums.new_tensor([order, order**2])])
            work = None
            if self._data_group is not None:
                work = dist.all_reduce(sums, group=self._data_group, async_op=True)
        self._accumulated = _Accumulated(batch.index, weight, sums, work)

    def update(self) -> StepResult:
        """Clips and applies the accumulated gradients; skips on every rank where their norm is not finite."""
        if self._accumulated is None:
            raise JobError(
                "update() was called without an accumulate().",
                "It applies the gradients of one global batch.",
                "Call accumulate(batch) first, or step(batch).",
            )
        self._settle_previous()
        step = self._accumulated
        with self.phases("update"):
            gradients = self._local_gradients()
            counted = [each for each, counts in zip(gradients, self._counted, strict=True) if counts]
            scale = self.loss_scale.value if self.loss_scale else 1.0
            norm = global_norm(counted, self._norm_groups, device=self.world.device) / scale
            if not step.weight:
                norm = norm * float("nan")  # where all is ignored, gradients may be zeros: skipped all the same
            lr_factor = self.lr_factor(self.num_updates)
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * lr_factor
            apply_update(self.optimizer, gradients, norm, clip_coefficient(norm, self._clip) / scale)
        lr = self._lr * lr_factor
        self._accumulated = None
        self.last_result = StepResult(index=step.index, lr=lr, loss_sum=step.sums[0], norm=norm, work=step.work)
        self._unsettled = self.last_result
        self._orders = step.sums[1:]
        return self.last_result

    @property
    def is_cut(self) -> bool:
        """Whether no rank holds the whole model, so that a forward and a look at whole weights take all ranks."""
        return self._shards is not None or self._tensor is not None

    def settle(self) -> None:
        """Takes in the outcome of the last step, so that `num_updates` and `loss_scale` are those of now."""
        self._settle_previous()

    def evaluate(self, batches: Iterable[RankBatch]) -> dict[str, float]:
        """Loss and metrics over all batches and ranks, each its total over its weight, exactly.

        Weights, buffers and modes of the model are as before. What a forward draws depends on (seed, position), so that
        evaluations can be compared. Every rank calls it with as many micro-batches.
        """
        sums = torch.zeros(2, len(self._measures), dtype=self._sum_dtype, device=self.world.device)
        with torch.no_grad(), evaluation_mode(self.model), unchanged_buffers(self.model), self.phases("evaluate"):
            for batch in batches:
                for micro_batch in batch.micro_batches:
                    tensors = self.to_device(micro_batch)
                    self.seed_micro_batch(_EVALUATION, micro_batch)
                    output = self.forward(tensors)
                    if not micro_batch.weightless:
                        sums += measure(self._measures.values(), output, tensors).to(sums)
            if self._data_group is not None:
                dist.all_reduce(sums, group=self._data_group)
            if self._shards is not None:
                self._shards.give_back()
        return read_means(self._measures, sums)

    def agree_on_weight(self, batch: RankBatch) -> float:
        """The batch's weight summed over all ranks, asked for now; the run asks one step ahead instead."""
        return float(self.world.agree(self.local_weight(batch)))

    def local_weight(self, batch: RankBatch) -> Tensor:
        """What this rank adds to the batch's weight: a float64 scalar on the CPU; no collective."""
        real = [each for each in batch.micro_batches if self.world.leads_data_rank and not each.weightless]
        weights = [self.loss.weight(each.tensors).double() for each in real]
        return torch.stack(weights).sum() if weights else torch.zeros((), dtype=torch.float64)

    def drop_gradients(self) -> None:
        """Forgets all gradients, as at the start of a step."""
        if self._replicas is not None:
            self._replicas.begin_step()
        if self._shards is not None:
            self._shards.drop_gradients()
        for parameter in (*self._parameters, *self._updated):
            parameter.grad = None

    def begin_trial(self) -> None:
        """Call before a forward and backward outside of a step; `drop_gradients` ends it."""
        if self._shards is not None:
            self._shards.begin_trial()

    def to_device(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The micro-batch's tensors on the device; floating-point ones in the parameters' type."""
        return {
            key: tensor.to(
                self.world.device, self._dtype if tensor.is_floating_point() else tensor.dtype, non_blocking=True
            )
            for key, tensor in micro_batch.tensors.items()
        }

    def forward(self, tensors: Mapping[str, Tensor]) -> Any:
        """The model's output at the run's precision; half-precision tensors in it are upcast."""
        with forward_context(self.precision, self.world.device):
            output = self.model(**{name: tensors[key] for name, key in self._inputs.items()})
        return upcast_output(output)

    def backward(self, total: Tensor) -> None:
        """The backward of a loss that was computed from `forward`'s output."""
        with nullcontext() if self._tensor is None else self._tensor.active():
            torch.autograd.backward(total)  # total.backward() would leave the context behind

    def seed_micro_batch(self, index: int, micro_batch: MicroBatch) -> None:
        """Seeds what a forward draws from (dropout) under (seed, step, position of its first sample)."""
        seed_forward(self.world.device, derive_seed(self._seed, index, micro_batch.position))

    def _run_micro_batch(self, index: int, micro_batch: MicroBatch, factor: float) -> Tensor:
        with unchanged_buffers(self.model) if micro_batch.weightless else nullcontext():
            with self.phases("forward"):
                tensors = self.to_device(micro_batch)
                self.seed_micro_batch(index, micro_batch)
                scaled = self.loss.total(self.forward(tensors), tensors) * factor
            with self.phases("backward"):
                self.backward(scaled)
        return scaled.detach()

    def _local_gradients(self) -> list[Tensor]:
        """This rank's numbers of all gradients, handed to what the optimizer holds of their parameters."""
        for parameter, updated in zip(self._parameters, self._updated, strict=True):
            if updated is not parameter and parameter.grad is not None:
                updated.grad = local_tensor(parameter.grad)
        gradients = [each.grad for each in self._updated]
        return [each for each in gradients if each is not None]

    def _complete_gradients(self) -> None:
        if self._replicas is not None:
            self._replicas.finish_step()
        if self._tensor is not None:
            self._tensor.reduce_partial(self._parameters)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            refuse_sparse(parameter.grad)

    def _refuse_other_orders(self, index: int) -> None:
        if not len(self._orders):
            return
        total, squares = self._orders.tolist()
        assert self._data_group is not None
        if squares * self._data_group.size() != total**2:
            raise JobError(
                f"the ranks used the model's blocks in different orders in step {index + 1}.",
                "Where parameters are sharded all ranks gather a block's together: those of different ones got mixed.",
                "Give blocks= a pattern for parts that every sample uses, or leave zero out.",
            )

    def _settle_previous(self) -> None:
        """Takes in whether the step before was skipped: the schedule and the loss scale advance by updates.

        Read as late as can be, so that the device has long finished that step and nobody waits.
        """
        if self._unsettled is None:
            return
        skipped = self._unsettled.skipped
        self._refuse_other_orders(self._unsettled.index)
        self.num_updates += not skipped
        if self.loss_scale is not None:
            self.loss_scale.update(skipped=skipped)
        self._unsettled = None
