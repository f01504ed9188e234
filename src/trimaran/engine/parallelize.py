"""Job × Layout → Engine: the one ordered table of what is applied to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from trimaran.engine.blocks import apply_compile, apply_recompute, find_blocks
from trimaran.engine.init import build_model, cast_parameters, record_model
from trimaran.engine.local import local_parameters, refuse_whole_tensor_optimizer
from trimaran.engine.precision import parameter_dtype
from trimaran.engine.shard import apply_shards, own_part
from trimaran.engine.step import Engine
from trimaran.engine.tensor import apply_tensor
from trimaran.errors import LayoutError
from trimaran.job import Job
from trimaran.layout import ResolvedLayout
from trimaran.phases import Phases
from trimaran.world.groups import World


def build_engine(
    job: Job,
    layout: ResolvedLayout,
    world: World,
    phases: Phases | None = None,
    load_weights: Callable[[nn.Module], object] | None = None,
    check_weights: Callable[[nn.Module], object] | None = None,
) -> Engine:
    """The engine that trains `job` on this rank; every rank must call it. `layout` must be resolved for the world.

    `load_weights` replaces the constructor's weights, in place, and `check_weights` looks at them, before anything is
    cast, moved or cut. With init="by_name" a sharded model is cut before it has values, where neither is asked to
    replace them nor tp to cut them too: no rank then holds more than its shards and one whole tensor, and weights are
    equal since they follow from their names.
    Raises JobError, OptimizerError or LayoutError where job and layout do not fit.
    """
    _check_precision(layout, world)
    recorded = record_model(job.model, job.seed) if job.init == "by_name" else None
    cut_first = recorded is not None and world.shards is not None and layout.tp == 1 and load_weights is None
    model = build_model(job.model, job.seed) if recorded is None else recorded.model
    if recorded is not None and not cut_first:
        recorded.fill()
    for prepare in (load_weights, check_weights):
        if prepare is not None and not cut_first:
            prepare(model)
    cast_parameters(model, parameter_dtype(layout.precision))
    if not cut_first:
        model.to(world.device)
    if not model.training:
        model.train()
    # In this order: cut the pipeline (to come), tensor, recompute, compile, shard.
    blocks = find_blocks(model, job.blocks)
    tensor = None
    if layout.tp > 1:
        assert world.mesh is not None
        tensor = apply_tensor(model, job.tp_plan, world.mesh["tp"], sp=layout.sp, blocks=blocks)
    if layout.recompute != "none":
        apply_recompute(_need_blocks(model, blocks, f"recompute={layout.recompute}"), layout.recompute)
    if layout.compile:
        apply_compile(_need_blocks(model, blocks, "compile=true"))
    shards = None
    if world.shards is not None:
        shards = apply_shards(model, world.shards, stage=layout.zero, blocks=blocks)
        if recorded is not None and cut_first:
            recorded.fill(partial(own_part, world.device))
            shards.take_in()
    lr = job.optimizer.rate(job.global_batch).value
    updated = local_parameters(model)
    optimizer = job.optimizer.build(updated.items(), lr)
    if shards is not None or tensor is not None:
        cut = [f"zero={layout.zero}"] * (shards is not None) + [f"tp={layout.tp}"] * (tensor is not None)
        refuse_whole_tensor_optimizer(optimizer, " ".join(cut))
    return Engine(
        model=model,
        world=world,
        precision=layout.precision,
        loss=job.loss if tensor is None else tensor.wrap_loss(job.loss),
        metrics=job.metrics,
        inputs=job.input_keys,
        optimizer=optimizer,
        updated=updated,
        shards=shards,
        tensor=tensor,
        lr=lr,
        lr_factor=job.schedule.resolve(total_steps=job.total_steps, steps_per_epoch=job.steps_per_epoch),
        clip=job.clip,
        seed=job.seed,
        phases=phases or Phases(),
    )


def _need_blocks(model: nn.Module, blocks: Mapping[str, nn.Module], wanted: str) -> Mapping[str, nn.Module]:
    if not blocks:
        raise LayoutError(
            f"{wanted}, and {type(model).__name__} has no blocks.",
            "It is applied to each of a model's repeated parts: those of its ModuleLists, or those that the job names.",
            'Name them in the job, as in blocks="layers.*".',
        )
    return blocks


def _check_precision(layout: ResolvedLayout, world: World) -> None:
    device = world.device.type
    if layout.precision == "tf32" and device != "cuda":
        raise LayoutError(
            f"precision=tf32 on {device}.", "TensorFloat-32 is a mode of NVIDIA's tensor cores.", "Use precision=fp32."
        )
    if layout.precision == "fp64" and device == "mps":
        raise LayoutError("precision=fp64 on mps.", "That device has no float64.", "Use precision=fp32, or the CPU.")
