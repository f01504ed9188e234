"""Runs a few steps of a job in one layout, on the ranks that call it, and gathers what came of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trimaran.batch import RankBatch
from trimaran.checkpoint import StateNames, load_weights
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.engine import Engine, build_engine, try_micro_batch
from trimaran.engine.tensor import undeal
from trimaran.job import Job
from trimaran.layout import ResolvedLayout
from trimaran.prove.verify_activations import Recorder, gather_activations
from trimaran.prove.verify_side import (
    EARLY_STATE,
    EARLY_WEIGHTS,
    FIRST_GRADIENTS,
    FIRST_WEIGHTS,
    SECOND_GRADIENTS,
    STATE,
    WEIGHTS,
    Side,
    Unlike,
)
from trimaran.prove.verify_traffic import Traffic
from trimaran.world.device import set_numerics
from trimaran.world.groups import World

_OPTIMIZER = "optimizer."
# How a kernel is chosen, and what is no option; all else in a group decides what is learnt.
_NO_OPTIONS = ("params", "names", "param_names", "fused", "foreach", "capturable", "differentiable")


def run_side(job: Job, layout: ResolvedLayout, world: World, *, steps: int) -> Side:
    """Trains so many steps, dropout off, and returns what they gave. Every rank must call it.

    All ranks return the same figures; whole tensors are kept on rank 0. Raises what building an engine raises, and
    JobError, LossError or NumericsError for what a run would refuse before its first step.
    """
    set_numerics(precision=layout.precision, deterministic=False)
    dropout: list[str] = []
    load = None if job.weights_in is None else partial(load_weights, weights=job.weights_in)
    quiet = replace(job, model=lambda: turn_dropout_off(job.model(), dropout))
    engine = build_engine(quiet, layout, world, load_weights=load)
    loader = _load(job, layout, world, steps)
    first = next(iter(loader))
    side = Side(
        job=job.name or "job",
        num_parameters=sum(each.numel() for each in engine.model.parameters()),
        global_batch=job.global_batch,
        layout=_describe(layout),
        precision=layout.precision,
        num_ranks=world.size,
        dp=layout.dp,
        tp=layout.tp,
        micro_batch=layout.micro_batch,
        num_micro_batches=len(first.micro_batches),
        num_samples=first.num_samples,
        optimizer=type(engine.optimizer).__name__,
        clip=job.clip,
        steps=steps,
        dropout=dropout,
        batch_norms=[name for name, each in engine.model.named_modules() if isinstance(each, _BatchNorm)],
    )
    try_micro_batch(engine, first.micro_batches[0], job.input_keys)
    side.weight = engine.agree_on_weight(first)
    side.cuts = _gather_cuts(first, world)
    _Runner(engine, world, side).run(loader, job, compiled=layout.compile)
    return side


def turn_dropout_off(model: nn.Module, found: list[str]) -> nn.Module:
    """Sets every dropout rate of the model to 0, and appends the names of the modules that had one.

    These are what torch's dropout modules call `p`, and, in any module, a fraction whose name has "drop" in it.
    """
    if isinstance(model, nn.Module):
        for name, module in model.named_modules():
            of_torch = type(module).__module__.startswith("torch.nn") and "Dropout" in type(module).__name__
            rates = [
                key
                for key, value in vars(module).items()
                if ("drop" in key.lower() or (of_torch and key == "p")) and isinstance(value, float) and 0 < value <= 1
            ]
            for key in rates:
                setattr(module, key, 0.0)
            if rates:
                found.append(name)
    return model


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU, complex numbers as pairs. The ranks that hold it must call it alike."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    full = torch.view_as_real(full) if full.is_complex() else full
    return full.cpu().clone(memory_format=torch.contiguous_format)


class _Runner:
    """Takes an engine through the steps and fills a side."""

    def __init__(self, engine: Engine, world: World, side: Side) -> None:
        self._engine = engine
        self._world = world
        self._side = side
        self._names = StateNames(engine.model, engine.optimizer, engine.updated)

    def run(self, loader: BatchLoader, job: Job, *, compiled: bool) -> None:
        engine, side = self._engine, self._side
        buffers = dict(engine.model.named_buffers())
        self._keep(FIRST_WEIGHTS, dict(engine.model.named_parameters()) | buffers)
        traffic = Traffic()
        for batch in loader:
            step = batch.index + 1
            counted = traffic if step == 2 else nullcontext()
            # A compiled block would take the hooks into its graph.
            recorder = Recorder(engine.model, batch, list(job.input_keys.values())) if step == 1 else None
            with counted, nullcontext() if recorder is None or compiled else recorder.recording():
                engine.accumulate(batch)
            if recorder is not None:
                self._take(recorder)
            if step <= 2:
                self._keep_gradients(FIRST_GRADIENTS if step == 1 else SECOND_GRADIENTS)
            with counted:
                result = engine.update()
            side.losses.append(result.loss)
            side.norms.append(result.grad_norm)
            if step == 1:
                self._keep_results(EARLY_WEIGHTS, EARLY_STATE)
        side.collectives = traffic.found if side.steps > 1 else None
        self._keep_results(WEIGHTS, STATE)
        side.options = _options(engine)

    def _take(self, recorder: Recorder) -> None:
        side = self._side
        side.activations = gather_activations(recorder.activations, self._world)
        of_ranks = map(
            json.loads, self._world.gather_text(json.dumps([list(recorder.rowless), recorder.draws_numbers]))
        )
        for rowless, draws_numbers in of_ranks:
            side.rowless += [name for name in rowless if name not in side.rowless]
            side.draws_numbers |= draws_numbers
        names = [name for name, _ in self._engine.model.named_parameters()]
        side.order = sorted(names, key=lambda name: _first_call(name, recorder.calls))

    def _keep_gradients(self, moment: str) -> None:
        """Those of the loss itself, as fp16's loss scale is the engine's own affair."""
        scale = self._engine.loss_scale.value if self._engine.loss_scale else 1.0
        self._side.loss_scale = scale
        gradients = {name: each.grad for name, each in self._engine.model.named_parameters() if each.grad is not None}
        kept = self._keep(moment, gradients, divide_by=scale)
        unlike = [each.name for each in self._side.unlike if each.moment == moment]
        if moment == FIRST_GRADIENTS and unlike:
            for axis, other in (("dp", "tp"), ("tp", "dp")):
                enters = 0.0 if getattr(self._world.place, other) else 1.0
                sums = {name: self._world.agree(kept[name].double() * enters) for name in unlike}
                self._side.rank_sums[axis] = sums

    def _keep_results(self, weights: str, state: str) -> None:
        self._keep(weights, dict(self._engine.model.named_parameters()))
        named = self._names.collect().tensors
        kept = {name.removeprefix(_OPTIMIZER): each for name, each in named.items() if name.startswith(_OPTIMIZER)}
        self._keep(state, kept)

    def _keep(self, moment: str, tensors: Mapping[str, Tensor], *, divide_by: float = 1.0) -> dict[str, Tensor]:
        """Gathers them, notes where ranks hold unlike bits, and keeps them on rank 0."""
        found = {name: self._whole(name, each) for name, each in tensors.items()}
        if divide_by != 1:
            found = {name: each / divide_by for name, each in found.items()}
        digests = json.dumps({name: _digest(each) for name, each in found.items()})
        first, *others = map(json.loads, self._world.gather_text(digests))
        seen: set[str] = set()
        for rank, theirs in enumerate(others, start=1):
            for name in first:
                if name not in seen and theirs.get(name) != first[name]:
                    seen.add(name)
                    self._side.unlike.append(Unlike(moment, name, rank))
        if self._world.rank == 0:
            self._side.tensors[moment] = found
        return found

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """All of a tensor of the model, its gradients or its optimizer, as the plain model has it."""
        found = whole(tensor)
        dealt = self._engine.dealt
        order = dealt.get(name) or dealt.get(name.rpartition(".")[0])  # of optimizer state: the parameter's
        return undeal(found, order) if order is not None and found.dim() else found


def _describe(layout: ResolvedLayout) -> str:
    """The layout with its precision, which is left out of its text where it is the default."""
    text = str(layout)
    return text if "precision=" in text else f"{text} precision={layout.precision}"


def _load(job: Job, layout: ResolvedLayout, world: World, steps: int) -> BatchLoader:
    return build_loader(
        job.data,
        collate=job.collate,
        order=Order(len(job.data), job.seed),
        global_batch=job.global_batch,
        total_samples=min(steps * job.global_batch, job.total_samples),
        dp=layout.dp,
        dp_rank=world.place.dp,
        micro_batch=layout.micro_batch,
    )


def _gather_cuts(batch: RankBatch, world: World) -> list[tuple[int, int]]:
    real = [each for each in batch.micro_batches if world.leads_data_rank and not each.weightless]
    texts = world.gather_text(json.dumps([(each.position, each.num_samples) for each in real]))
    return sorted((start, count) for text in texts for start, count in json.loads(text))


def _options(engine: Engine) -> dict[str, dict[str, Any]]:
    """Parameter name -> the options of its group that can be compared."""
    names = {id(parameter): name for name, parameter in engine.updated.items()}
    found: dict[str, dict[str, Any]] = {}
    for group in engine.optimizer.param_groups:
        plain = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in group.items()
            if key not in _NO_OPTIONS and _is_plain(value)
        }
        for name in group.get("names") or [names.get(id(each), "?") for each in group["params"]]:
            found[name] = plain
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _first_call(name: str, calls: Mapping[str, int]) -> int:
    """When the parameter's module was first called, or the nearest one around it that was."""
    module = name
    while module:
        module = module.rpartition(".")[0]
        if module in calls:
            return calls[module]
    return 0


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.reshape(-1).view(torch.uint8).numpy().data, digest_size=8).hexdigest()
