"""Job × Layout → Engine: the one ordered table of what is applied to a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from trimaran.engine.init import build_model, cast_parameters, record_model
from trimaran.engine.precision import parameter_dtype
from trimaran.engine.step import Engine
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
) -> Engine:
    """The engine that trains `job` on this rank; every rank must call it. `layout` must be resolved for the world.

    `load_weights` replaces the constructor's weights, in place, before anything is cast, moved or cut.
    Raises JobError, OptimizerError or LayoutError where job and layout do not fit.
    """
    _check_precision(layout, world)
    model = build_model(job.model, job.seed) if job.init == "whole" else record_model(job.model, job.seed).fill()
    if load_weights is not None:
        load_weights(model)
    cast_parameters(model, parameter_dtype(layout.precision))
    model.to(world.device)
    if not model.training:
        model.train()
    # Here follow, in this order: cut the pipeline, tensor, recompute, compile, shard.
    lr = job.optimizer.rate(job.global_batch).value
    optimizer = job.optimizer.build(model.named_parameters(), lr)
    return Engine(
        model=model,
        world=world,
        precision=layout.precision,
        loss=job.loss,
        metrics=job.metrics,
        inputs=job.input_keys,
        optimizer=optimizer,
        lr=lr,
        lr_factor=job.schedule.resolve(total_steps=job.total_steps, steps_per_epoch=job.steps_per_epoch),
        clip=job.clip,
        seed=job.seed,
        phases=phases or Phases(),
    )


def _check_precision(layout: ResolvedLayout, world: World) -> None:
    device = world.device.type
    if layout.precision == "tf32" and device != "cuda":
        raise LayoutError(
            f"precision=tf32 on {device}.", "TensorFloat-32 is a mode of NVIDIA's tensor cores.", "Use precision=fp32."
        )
    if layout.precision == "fp64" and device == "mps":
        raise LayoutError("precision=fp64 on mps.", "That device has no float64.", "Use precision=fp32, or the CPU.")
