"""Again: the same state after saving and loading, the same run under the same seed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from trimaran.batch import RankBatch
from trimaran.checkpoint import load_weights, save_weights
from trimaran.engine import Engine
from trimaran.job import Job, Weights
from trimaran.prove.bench import Bench
from trimaran.prove.evaluation import digest, digest_state, some
from trimaran.prove.finding import Finding, failed, passed
from trimaran.world.rng import seed_everything

SAVE = "save_and_load"
SAME = "same_seed"

_SAVE_RULE = "All that training changes lies in parameters and in buffers that are saved."
_SAME_RULE = "A run is a function of its seed, which the default generators of torch, numpy and Python are given."
_GPU_TOLERANCE = 1e-3
"""Relative, over three steps: without --deterministic, GPU kernels add in an order that differs."""


@dataclass(frozen=True)
class FirstSteps:
    """What a second run under the same seed must repeat."""

    weights: Mapping[str, int]
    batches: Sequence[RankBatch]
    losses: Sequence[float]


def look_at_saving(bench: Bench, trained: Engine) -> Finding:
    """Saves the trained model, loads it into a fresh one, and evaluates both under one seed."""
    batch = bench.evaluation_batch()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save_weights(trained.model, file)
        fresh = bench.build_engine(load=partial(load_weights, weights=Weights(file)))
    figures = []
    for engine in (trained, fresh):
        seed_everything(bench.job.seed)
        figures.append(engine.evaluate([batch]))
    lost = _lost_buffers(trained.model, fresh.model)
    names = f"Buffers that training changes and nobody saves: {some(lost)}." if lost else ""
    if not lost and _all_equal(list(figures[0].values()), list(figures[1].values())):
        return passed(SAVE, "an evaluation gives the same bits after saving and loading", _SAVE_RULE)
    changed = [name for name in figures[0] if not _equal(figures[0][name], figures[1][name])]
    told = "; ".join(f"{name} {figures[0][name]!r} before and {figures[1][name]!r} after" for name in changed)
    return failed(
        SAVE,
        f"An evaluation gives {told} saving and loading. {names}".strip() if changed else names,
        _SAVE_RULE,
        "Keep such state with register_buffer(name, tensor), persistent; plain attributes are not saved.",
    )


def look_at_same_seed(bench: Bench, job: Job, first: FirstSteps) -> Finding:
    """Runs the first steps again, from a fresh model and freshly loaded batches."""
    engine = bench.build_engine(job)
    weights = digest_state(engine.model)
    other = [name for name in {**first.weights, **weights} if first.weights.get(name) != weights.get(name)]
    if other:
        return _not_same(f"The constructor gives other first values to {some(other)} under the same seed.")
    losses = []
    loader = bench.loader(bench.subset(), batch=bench.subset_batch, steps=len(first.batches))
    for before, batch in zip(first.batches, loader, strict=True):
        if keys := _different_keys(before, batch):
            return _not_same(f"The data gives other {some(keys)} for the same samples under the same seed.")
        losses.append(engine.step(batch).loss)
    tolerance = 0.0 if engine.world.device.type == "cpu" else _GPU_TOLERANCE
    if _all_equal(first.losses, losses, tolerance):
        bits = "to the bit" if not tolerance else f"to {tolerance:g}"
        return passed(SAME, f"weights, batches and losses of {len(losses)} steps repeat {bits}", _SAME_RULE)
    step = next(number for number in range(len(losses)) if not _equal(first.losses[number], losses[number], tolerance))
    return _not_same(
        f"Forward or backward draws from elsewhere: with equal weights and batches the loss of step {step + 1} is "
        f"{first.losses[step]!r} and {losses[step]!r}."
    )


def _not_same(value: str) -> Finding:
    return failed(
        SAME,
        value,
        _SAME_RULE,
        "Draw from the default generators, or seed your own inside the call: not default_rng(), Random() or "
        "Generator() seeded by time.",
    )


def _lost_buffers(trained: nn.Module, fresh: nn.Module) -> list[str]:
    """Buffers that are not saved and differ between two models whose saved state is equal, both just evaluated.

    One of another shape is a cache that grew.
    """
    saved = set(trained.state_dict())
    theirs = dict(fresh.named_buffers())
    return [
        name
        for name, each in trained.named_buffers()
        if name not in saved
        and name in theirs
        and each.shape == theirs[name].shape
        and digest(each) != digest(theirs[name])
    ]


def _different_keys(one: RankBatch, other: RankBatch) -> list[str]:
    return [
        key
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True)
        for key, tensor in mine.tensors.items()
        if key not in theirs.tensors or not _same_tensor(tensor, theirs.tensors[key])
    ]


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and digest(one) == digest(other)


def _all_equal(ones: Sequence[float], others: Sequence[float], tolerance: float = 0.0) -> bool:
    return all(_equal(one, other, tolerance) for one, other in zip(ones, others, strict=True))


def _equal(one: float, other: float, tolerance: float = 0.0) -> bool:
    return one == other or (one != one and other != other) or abs(one - other) <= tolerance * abs(one)
