"""Faults planted into the engine: verify finds each, names the tensor in which it shows first, and says why it can."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parity_engine import buckets_of, join
from parity_jobs import WIDTH, Attention, Case, build_job
from torch import Tensor, nn

from pool import Pool
from trimaran.batch import RankBatch
from trimaran.engine import parallelize, step
from trimaran.engine.replicas import Bucket, Replicas
from trimaran.engine.step import Engine
from trimaran.layout import Layout
from trimaran.optim import groups
from trimaran.prove.verify_compare import Difference, Verification, compare
from trimaran.prove.verify_run import run_side
from trimaran.prove.verify_side import Side
from trimaran.world.groups import World

STEPS = 3
SGD = Case(dp=2, micro_batch=2)
ADAMW = Case(dp=2, micro_batch=2, optimizer="adamw")
Patches = list[AbstractContextManager[Any]]


def run(case: Case, fault: str | None) -> Side:
    """A side on this rank, with a fault in the engine; the workers live on, so that it is undone."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(precision=case.precision, micro_batch=case.micro_batch).resolve(
        world_size=world_size, global_batch=case.global_batch
    )
    world = join(layout)
    with ExitStack() as planted:
        for each in FAULTS[fault].plant(world) if fault else []:
            planted.enter_context(each)
        return run_side(build_job(case), layout, world, steps=STEPS)


# ── The faults ──────────────────────────────────────────────────────────────────────────────────────────────────────


def after(owner: Any, name: str, then: Callable[..., None]) -> AbstractContextManager[Any]:
    """`then` is called with what the function was called with, after it."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return patch.object(owner, name, call)


def instead(owner: Any, name: str, call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`call` takes the original function before its arguments."""
    return patch.object(owner, name, _bound(call, getattr(owner, name)))


def _bound(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    # Not a partial: a method must take self.
    return lambda *args, **kwargs: call(original, *args, **kwargs)


def drop_one_reduction(world: World) -> Patches:
    """up.weight, the only parameter of its shape, is not summed over the ranks."""

    def reduce(original: Any, self: Replicas, bucket: Bucket) -> None:
        if tuple(bucket.parameters[0].shape) != (2 * WIDTH, WIDTH):
            original(self, bucket)
            return
        bucket.work = dist.all_reduce(torch.zeros(1), async_op=True)

    return [buckets_of(1), instead(Replicas, "_reduce", reduce)]


def reduce_in_pairs(world: World) -> Patches:
    """Gradients are summed over two of four ranks."""

    def init(original: Any, self: Replicas, parameters: Any, group: Any) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        original(self, parameters, pairs[dist.get_rank() // 2])

    return [instead(Replicas, "__init__", init)]


def average(world: World) -> Patches:
    def divide(self: Replicas) -> None:
        for bucket in self.buckets:
            bucket.flat /= 2

    return [after(Replicas, "finish_step", divide)]


def count_gradient_twice(world: World) -> Patches:
    """The tied weight's gradient is added for the embedding and for the head, each whole."""

    def double(self: Engine) -> None:
        gradient = dict(self.model.named_parameters())["embed.weight"].grad
        assert gradient is not None
        gradient *= 2

    return [after(Engine, "_complete_gradients", double)]


def scale_loss(by: Callable[[Engine], float]) -> Callable[[World], Patches]:
    def plant(world: World) -> Patches:
        weights: list[float] = []

        def note(original: Any, self: Engine, batch: RankBatch) -> float:
            weights.append(original(self, batch))
            return weights[-1]

        def scaled(original: Any, self: Engine, index: int, micro_batch: Any, factor: float) -> Tensor:
            result: Tensor = original(self, index, micro_batch, factor * (by(self) or weights[-1]))
            return result

        return [instead(Engine, "agree_on_weight", note), instead(Engine, "_run_micro_batch", scaled)]

    return plant


def skip_last_micro_batch(world: World) -> Patches:
    def accumulate(original: Any, self: Engine, batch: RankBatch) -> None:
        weight = self.agree_on_weight(batch)
        original(self, replace(batch, micro_batches=batch.micro_batches[:-1], total_weight=weight))

    return [instead(Engine, "accumulate", accumulate)]


def same_samples_on_all_ranks(world: World) -> Patches:
    """Each rank trains on rank 0's samples."""
    from trimaran.prove import verify_run

    def load(original: Any, job: Any, layout: Any, world: World, steps: int) -> Any:
        return original(job, layout, replace(world, place=replace(world.place, dp=0)), steps)

    return [instead(verify_run, "_load", load)]


def local_weight(world: World) -> Patches:
    """Each rank divides by the weight of its own samples."""
    return [instead(Engine, "agree_on_weight", lambda original, self, batch: float(self.local_weight(batch)))]


def keep_stale_gradients(world: World) -> Patches:
    def drop(original: Any, self: Engine) -> None:
        if self.last_result is None:
            original(self)

    return [instead(Engine, "drop_gradients", drop)]


def norm_without_scale(world: World) -> Patches:
    return [instead(step, "global_norm", lambda original, *args, **kwargs: original(*args, **kwargs) * 2.0**16)]


def count_twice_in_norm(world: World) -> Patches:
    """The tied weight, once for the embedding and once for the head."""

    def norm(original: Any, gradients: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = original([*gradients, _of_embedding(gradients)], *args, **kwargs)
        return result

    return [instead(step, "global_norm", norm)]


def _of_embedding(gradients: list[Tensor]) -> Tensor:
    return next(each for each in gradients if each.shape == (11, WIDTH))


def clip_twice(world: World) -> Patches:
    return [instead(step, "clip_coefficient", lambda original, norm, clip: original(norm, clip).square())]


def never_clip(world: World) -> Patches:
    return [instead(step, "clip_coefficient", lambda original, norm, clip: torch.ones_like(norm))]


def swap_decay_groups(world: World) -> Patches:
    return [instead(groups, "_decays", lambda original, *args: not original(*args))]


def decay_one_norm(world: World) -> Patches:
    return [instead(groups, "_decays", lambda original, name, *args: name == "norm2.weight" or original(name, *args))]


def other_weights_on_rank_1(world: World) -> Patches:
    def build(original: Any, *args: Any) -> nn.Module:
        model: nn.Module = original(*args)
        if world.rank == 1:
            with torch.no_grad():
                model.get_parameter("norm2.weight").add_(1e-6)
        return model

    return [instead(parallelize, "build_model", build)]


def other_seed(world: World) -> Patches:
    return [
        instead(
            parallelize,
            "build_model",
            lambda original, constructor, seed, *args: original(constructor, seed + 1, *args),
        )
    ]


def no_update_on_rank_1(world: World) -> Patches:
    return [instead(step, "apply_update", lambda original, *args: original(*args) if world.rank != 1 else None)]


def forget_momentum(world: World) -> Patches:
    def update(original: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        optimizer.state.clear()
        original(optimizer, *args)

    return [instead(step, "apply_update", update)]


def attention_on_rank_1(world: World) -> Patches:
    def forward(original: Any, self: Attention, x: Tensor) -> Tensor:
        output: Tensor = original(self, x)
        return output * 1.001 if world.rank == 1 else output

    return [instead(Attention, "forward", forward)]


@dataclass(frozen=True)
class Fault:
    """How it is planted, in which case, and what verify must say: the tensor, and words of what and of the cause."""

    plant: Callable[[World], Patches]
    tensor: str
    says: str
    case: Case = SGD


FAULTS = {
    "a reduction is dropped": Fault(drop_one_reduction, "up.weight", "reduction over dp is missing"),
    "gradients are reduced in pairs": Fault(
        reduce_in_pairs, "norm3.bias", "groups of 2 of the 4", Case(dp=4, micro_batch=1)
    ),
    "gradients are averaged": Fault(average, "norm3.bias", "1 / dp"),
    "a tied gradient counts twice": Fault(count_gradient_twice, "embed.weight", "factor of 2 = dp"),
    "the loss is doubled": Fault(scale_loss(lambda engine: 2.0), "loss", "factor of 2 = dp or micro-batches"),
    "the loss is not divided": Fault(scale_loss(lambda engine: 0.0), "loss", "the batch's weight"),
    "the last micro-batch is skipped": Fault(skip_last_micro_batch, "input_ids", "did not go forward"),
    "ranks share samples": Fault(same_samples_on_all_ranks, "input_ids", "did not go forward"),
    "the weight is the rank's own": Fault(local_weight, "loss", "figure of step 1"),
    "gradients are not dropped": Fault(
        keep_stale_gradients, "norm3.bias", "it was not dropped", Case(dp=1, micro_batch=3)
    ),
    "the norm keeps the loss scale": Fault(
        norm_without_scale, "gradient norm", "the loss scale", Case(dp=2, precision="fp16")
    ),
    "the norm counts one twice": Fault(count_twice_in_norm, "gradient norm", "embed.weight is counted 2 times"),
    "clipped twice": Fault(clip_twice, "embed.weight", "the clip coefficient", ADAMW),
    "not clipped": Fault(never_clip, "embed.weight", "1 / the clip coefficient", ADAMW),
    "decay groups are swapped": Fault(swap_decay_groups, "unused", "weight_decay is 0.0 here, and 0.05"),
    "a norm decays": Fault(decay_one_norm, "norm2.weight", "weight_decay is 0.1 here, and 0.0", ADAMW),
    "a rank has other weights": Fault(other_weights_on_rank_1, "norm2.weight", "first value on rank 1"),
    "another seed": Fault(other_seed, "frozen", "first value"),
    "a rank does not update": Fault(no_update_on_rank_1, "unused", "weight after step 1 on rank 1"),
    "momentum is forgotten": Fault(forget_momentum, "loss", "figure of step 3"),
    "a rank's attention is off": Fault(attention_on_rank_1, "attention", "output in step 1"),
}


# ── The tests ───────────────────────────────────────────────────────────────────────────────────────────────────────

_sides: dict[Case, Side] = {}


def reference(pool: Pool, case: Case) -> Side:
    """One process, which does not know how a batch is cut; each runs once."""
    plain = replace(case, dp=1, micro_batch=None)
    if plain not in _sides:
        _sides[plain] = pool.run(run, 1, plain, None)[0]
    return _sides[plain]


def verified(pool: Pool, case: Case, fault: str | None) -> Verification:
    return compare(pool.run(run, case.dp, case, fault)[0], reference(pool, case))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(pool: Pool, fault: str) -> None:
    planted = FAULTS[fault]
    found = verified(pool, planted.case, fault).difference
    assert isinstance(found, Difference)
    assert found.tensor == planted.tensor, found
    assert planted.says in f"{found.what}: {found.cause}", found


@pytest.mark.parametrize("case", dict.fromkeys(planted.case for planted in FAULTS.values()), ids=str)
def test_without_a_fault_all_is_equal(pool: Pool, case: Case) -> None:
    verification = verified(pool, case, None)
    assert verification.equal, verification
    assert {row.status for row in verification.rows} <= {"passed", "reported"}
    assert not any("differs" in each for each in verification.not_compared), "the outputs of modules agree, too"
