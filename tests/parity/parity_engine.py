"""The same job through the engine, on one rank of the pool; and the rule by which results are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from parity_jobs import Case, build_job
from parity_plain import FP16_SCALE, Trace, optimizer_state
from torch import Tensor
from torch.distributed.tensor import DTensor

import trimaran as tm
import trimaran.engine.replicas as replicas
from trimaran.checkpoint.state import OPTIMIZER, StateNames
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.engine import Engine, build_engine
from trimaran.engine.tensor import undeal
from trimaran.layout import Layout, Precision, ResolvedLayout
from trimaran.prove.tolerances import excesses
from trimaran.world.groups import World, join_default_group, open_world

CPU = torch.device("cpu")


def join(layout: ResolvedLayout) -> World:
    """This rank's world, as the pool made it."""
    return join_default_group(layout, CPU) if dist.is_initialized() else open_world(None, layout, device="cpu")


def start(
    job: tm.Job,
    *,
    precision: Precision = "fp64",
    micro_batch: int | None = None,
    first_step: int = 0,
    layout: str = "",
) -> tuple[Engine, BatchLoader, World]:
    """Engine and this rank's loader for a job on as many ranks as there are."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    wanted = replace(Layout.parse(layout), precision=precision, micro_batch=micro_batch)
    layout = wanted.resolve(world_size=world_size, global_batch=job.global_batch)
    world = join(layout)
    engine = build_engine(job, layout, world)
    return engine, load(job, layout, world, first_step=first_step), world


def load(job: tm.Job, layout: ResolvedLayout, world: World, *, first_step: int = 0) -> BatchLoader:
    """This rank's share of the job's training data."""
    return build_loader(
        job.data,
        collate=job.collate,
        order=Order(len(job.data), job.seed),
        global_batch=job.global_batch,
        total_samples=job.total_samples,
        dp=layout.dp,
        dp_rank=world.place.dp,
        micro_batch=layout.micro_batch,
        first_step=first_step,
    )


@contextmanager
def buckets_of(num_bytes: int) -> Iterator[None]:
    """Engines built inside have buckets of this size. Workers live on, so that it must be undone."""
    before = replicas.BUCKET_BYTES
    replicas.BUCKET_BYTES = num_bytes
    try:
        yield
    finally:
        replicas.BUCKET_BYTES = before


def engine_run(case: Case) -> Trace:
    """Trains the case to its end on this rank."""
    engine, loader, _ = start(
        build_job(case), precision=case.precision, micro_batch=case.micro_batch, layout=case.layout
    )
    trace = Trace()

    def count(*_: object) -> None:
        trace.num_forwards += 1

    engine.model.register_forward_pre_hook(count)
    trained = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
    scale = FP16_SCALE if case.precision == "fp16" else 1.0
    for batch in loader:
        engine.accumulate(batch)
        if batch.index == 0:
            trace.first_gradients = {name: whole(each.grad).clone() / scale for name, each in trained.items()}
        result = engine.update()
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights = {name: whole(each).detach().clone() for name, each in engine.model.named_parameters()}
    trace.state = whole_state(engine) if engine.is_cut else optimizer_state(engine.optimizer, trained)
    return trace


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_order(engine: Engine, name: str, tensor: Tensor) -> Tensor:
    """All of a parameter's tensor, with its rows as the model has them."""
    order = engine.dealt.get(name)
    gathered = whole(tensor.detach()).clone()
    return undeal(gathered, order) if order is not None and gathered.dim() else gathered


def whole_gradients(engine: Engine) -> dict[str, Tensor]:
    """Those of all trained parameters."""
    trained = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
    return {name: in_order(engine, name, each.grad) for name, each in trained.items() if each.grad is not None}


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    return {name: in_order(engine, name, each) for name, each in engine.model.named_parameters()}


def whole_state(engine: Engine) -> dict[str, Tensor]:
    """As `optimizer_state`, from what a checkpoint would hold."""
    tensors = StateNames(engine.model, engine.optimizer, engine.updated).collect().tensors
    parts = {name.removeprefix(OPTIMIZER).rpartition("."): each for name, each in tensors.items() if OPTIMIZER in name}
    return {f"{kind}/{name}": in_order(engine, name, each) for (name, _, kind), each in parts.items()}


def engine_runs(cases: list[Case]) -> list[Trace]:
    """Several cases on the same ranks, one after the other."""
    return [engine_run(case) for case in cases]


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """By the rule of `excesses`, for each tensor."""
    assert actual.keys() == expected.keys()
    excess = excesses(actual, expected)
    worst = max(excess, key=lambda name: excess[name])
    assert excess[worst] <= tolerance, f"{what} of {worst} is off by {excess[worst]:.2e}, allowed is {tolerance:.0e}"


def assert_state_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """The same rule for each kind of optimizer state by itself."""
    assert actual.keys() == expected.keys()
    for kind in {name.split("/")[0] for name in expected}:
        mine, theirs = (
            {name: each for name, each in one.items() if name.startswith(f"{kind}/")} for one in (actual, expected)
        )
        assert_close(mine, theirs, tolerance, "state")


def assert_same_bits(traces: list[Trace]) -> None:
    """Every rank has the first one's gradients, figures, weights and state."""
    first = traces[0]
    for trace in traces[1:]:
        assert trace.losses == first.losses
        assert trace.norms == first.norms
        assert trace.num_forwards == first.num_forwards
        for one, other in (
            (trace.first_gradients, first.first_gradients),
            (trace.weights, first.weights),
            (trace.state, first.state),
        ):
            assert all(torch.equal(one[name], other[name]) for name in other)
