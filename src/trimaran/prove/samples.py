"""Samples of one batch: independent of each other, except through batch statistics, which depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trimaran.batch import MicroBatch
from trimaran.engine import Engine, evaluation_mode
from trimaran.prove.bench import Bench
from trimaran.prove.finding import Finding, failed, passed, skipped
from trimaran.prove.rows import can_compare, exchange, find_mixing

INDEPENDENT = "independent_samples"
STATISTICS = "batch_statistics"

_INDEPENDENT_RULE = "A sample's output depends on that sample alone."
_STATISTICS_RULE = (
    "Batch statistics depend on how a batch is cut: runs are equal for the same dp × micro-batch only, and below "
    "16 samples a forward the error rises (Wu and He 2018, Group Normalization, figure 1)."
)
_FEWEST_SAMPLES = 16
_RANKS = 2
_NOISE = 0.02


def look_at_independence(bench: Bench, engine: Engine, micro_batch: MicroBatch) -> Iterator[Finding]:
    """Exchanges one sample's inputs and looks at the outputs of the others, in evaluation mode."""
    if micro_batch.num_samples < 2:
        yield skipped(INDEPENDENT, "the global batch is one sample")
        return
    tensors = engine.to_device(micro_batch)
    changed = exchange(tensors, list(bench.job.input_keys.values()))
    if changed is None:
        yield skipped(INDEPENDENT, "all samples of the first micro-batch have the same inputs")
        return
    with evaluation_mode(engine.model), _moved_parameters(engine.model):
        comparable = can_compare(engine, micro_batch)
        mixing = find_mixing(engine, micro_batch, changed) if comparable else None
    if not comparable:
        yield skipped(INDEPENDENT, "the model's output has no row for each sample, or does not repeat under one seed")
    elif mixing is None:
        yield passed(INDEPENDENT, "one sample's inputs do not change the outputs of the others", _INDEPENDENT_RULE)
    else:
        yield failed(
            INDEPENDENT,
            f"One sample's inputs change the outputs of others, in {_describe(engine.model, mixing)}.",
            _INDEPENDENT_RULE,
            "Look there for attention or a mean over dimension 0, batch_first, or a view() that mixes samples.",
        )


def look_at_statistics(bench: Bench, engine: Engine, micro_batch: MicroBatch, *, leaks: bool) -> Iterator[Finding]:
    """Names what computes statistics over a batch in training; `leaks`: samples touch in evaluation already."""
    mixing = [name for name, each in engine.model.named_modules() if isinstance(each, _BatchNorm) and each.training]
    if not mixing and not leaks and micro_batch.num_samples > 1 and can_compare(engine, micro_batch):
        changed = exchange(engine.to_device(micro_batch), list(bench.job.input_keys.values()))
        found = find_mixing(engine, micro_batch, changed) if changed is not None else None
        mixing = [] if found is None else [found]
    if not mixing:
        yield passed(STATISTICS, "none")
        return
    num_samples = -(-bench.job.global_batch // _RANKS)
    what = _describe(engine.model, mixing[0]) + (f" and {len(mixing) - 1} more" if len(mixing) > 1 else "")
    seen = f"{what}: statistics over {num_samples} samples a forward on {_RANKS} ranks"
    if num_samples >= _FEWEST_SAMPLES:
        yield passed(STATISTICS, f"{seen}; they depend on the layout", _STATISTICS_RULE)
        return
    yield failed(
        STATISTICS,
        f"{seen}.",
        _STATISTICS_RULE,
        f"Use GroupNorm, or a global batch of {_RANKS * _FEWEST_SAMPLES} and more.",
    )


def _describe(model: nn.Module, name: str) -> str:
    return f"{name or 'the model itself'} ({type(model.get_submodule(name)).__name__})"


@contextmanager
def _moved_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, parameters are a little off: a branch that starts at zero would hide what it does to samples."""
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for each in (each for each in model.parameters() if each.is_floating_point()):
                kept.append((each, each.clone()))
                each.add_(torch.randn(each.shape, generator=generator, dtype=each.dtype).to(each.device), alpha=_NOISE)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
