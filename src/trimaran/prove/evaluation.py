"""Evaluation leaves no trace: weights, buffers and random state are as before."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.batch import MicroBatch
from trimaran.engine import Engine, evaluation_mode
from trimaran.engine.measure import measure, read_means
from trimaran.prove.bench import Bench
from trimaran.prove.finding import Finding, failed, passed
from trimaran.world.rng import seed_everything

NAMES = ("evaluation_keeps_state", "evaluation_keeps_randomness")

_STATE_RULE = "A model in evaluation mode changes nothing of itself."
_RANDOM_RULE = "A model in evaluation mode draws nothing: its result repeats."
_MOST_NAMES = 5


def look_at_evaluation(bench: Bench, engine: Engine) -> Iterator[Finding]:
    """Evaluates one micro-batch, twice under one seed, and compares what there is before and after."""
    micro_batch = bench.evaluation_batch().micro_batches[0]
    seed_everything(bench.job.seed)
    state, randomness = digest_state(engine.model), _random_states(engine)
    first = _evaluate(bench, engine, micro_batch)
    told = _judge_state(state, digest_state(engine.model))
    yield told
    drawn = [name for name, after in _random_states(engine).items() if randomness[name] != after]
    seed_everything(bench.job.seed)
    second = _evaluate(bench, engine, micro_batch) if told.status == "passed" else first
    yield _judge_randomness(drawn, first, second)


def _evaluate(bench: Bench, engine: Engine, micro_batch: MicroBatch) -> dict[str, float]:
    """Loss and metrics, without what `Engine.evaluate` does for a model that draws or changes its buffers."""
    measures = {"loss": bench.job.loss, **bench.job.metrics}
    with torch.no_grad(), evaluation_mode(engine.model):
        tensors = engine.to_device(micro_batch)
        return read_means(measures, measure(measures.values(), engine.forward(tensors), tensors))


def digest_state(model: nn.Module) -> dict[str, int]:
    """A digest of every parameter and buffer, those that are not saved included."""
    return {name: digest(each) for name, each in [*model.named_parameters(), *model.named_buffers()]}


def digest(tensor: Tensor) -> int:
    """CRC-32 over the tensor's bytes: equal for equal bits."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _judge_state(before: dict[str, int], after: dict[str, int]) -> Finding:
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if not changed:
        return passed(NAMES[0], "weights and buffers are as before", _STATE_RULE)
    return failed(
        NAMES[0],
        f"An evaluation changes {some(changed)}.",
        _STATE_RULE,
        "Change them only `if self.training:`, and let train() and eval() reach every module.",
    )


def _judge_randomness(drawn: list[str], first: dict[str, float], second: dict[str, float]) -> Finding:
    remedy = "Write F.dropout(x, p, training=self.training), and draw other noise only `if self.training:`."
    if drawn:
        return failed(NAMES[1], f"An evaluation draws from the generator of {', '.join(drawn)}.", _RANDOM_RULE, remedy)
    # Compared as texts, in which not-a-number is equal to itself.
    other = [name for name in first if repr(first[name]) != repr(second[name])]
    if other:
        shown = f"{other[0]} {first[other[0]]!r} and then {second[other[0]]!r}"
        return failed(NAMES[1], f"An evaluation of the same samples gives {shown}.", _RANDOM_RULE, remedy)
    return passed(NAMES[1], "python's, numpy's and torch's generators are as before; the result repeats", _RANDOM_RULE)


def _random_states(engine: Engine) -> dict[str, Any]:
    _, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (np.asarray(keys).tobytes(), *rest),
        "torch": digest(torch.get_rng_state()),
    }
    device = engine.world.device
    if device.type == "cuda":
        states["cuda"] = digest(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states["mps"] = digest(torch.mps.get_rng_state())
    return states
