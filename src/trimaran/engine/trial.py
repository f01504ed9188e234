"""One dry micro-batch before step 1: shape errors, out-of-memory and a loss that is a mean are found here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trimaran.batch import MicroBatch
from trimaran.engine.buffers import unchanged_buffers
from trimaran.engine.measure import evaluation_mode
from trimaran.engine.replicas import refuse_sparse
from trimaran.engine.step import Engine
from trimaran.errors import JobError, LossError, NumericsError, TrimaranError


@dataclass(frozen=True)
class Trial:
    """What a dry micro-batch told: FLOPs of forward and backward per sample, and parameters without a gradient."""

    flops_per_sample: float
    unused_parameters: tuple[str, ...]


def try_micro_batch(engine: Engine, micro_batch: MicroBatch, inputs: Mapping[str, str]) -> Trial:
    """Runs forward and backward once and leaves no trace: weights, buffers and torch's generators are as before.

    To be called before the first step, since it leaves no gradient. Each rank tries its own micro-batch; where
    parameters are sharded every rank must call it, else it is free of collectives. Raises JobError, LossError or
    NumericsError for what would fail later.
    """
    _check_keys(inputs, micro_batch)
    devices = [engine.world.device] if engine.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _explained(inputs, micro_batch):
        engine.seed_micro_batch(0, micro_batch)
        engine.begin_trial()
        with unchanged_buffers(engine.model), FlopCounterMode(display=False) as counter:
            tensors = engine.to_device(micro_batch)
            total = engine.loss.total(engine.forward(tensors), tensors)
            _check_total(total)
            engine.backward(total)
        unused = _finish_gradients(engine)
        with torch.no_grad(), evaluation_mode(engine.model), unchanged_buffers(engine.model):
            _check_sum(engine, tensors, micro_batch.num_samples)
        engine.drop_gradients()
    return Trial(counter.get_total_flops() / micro_batch.num_samples, unused)


@contextmanager
def _explained(inputs: Mapping[str, str], micro_batch: MicroBatch) -> Iterator[None]:
    """Raises what the model, the loss or the device raise as a JobError that says what they were given."""
    try:
        yield
    except TrimaranError:
        raise
    except torch.OutOfMemoryError as problem:
        raise JobError(
            f"a micro-batch of {micro_batch.num_samples} samples does not fit into the memory of this device.",
            "Activations grow with the micro-batch.",
            'Give a smaller one: --layout "micro_batch=...".',
        ) from problem
    except Exception as problem:
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in micro_batch.tensors.items())
        raise JobError(
            f"the first micro-batch made the model or its loss raise {type(problem).__name__}: {problem}",
            f"It is called as in plain PyTorch, with {', '.join(inputs)}; this batch has {shapes}.",
            "Correct the model, the loss or the data's shapes; --traceback shows where.",
        ) from problem


def _finish_gradients(engine: Engine) -> tuple[str, ...]:
    """Looks at the gradients and drops them; the names of trained parameters that have none."""
    trained = {name: each for name, each in engine.model.named_parameters() if each.requires_grad}
    for parameter in trained.values():
        if parameter.grad is not None:
            refuse_sparse(parameter.grad)
    unused = tuple(name for name, parameter in trained.items() if parameter.grad is None)
    engine.drop_gradients()
    return unused


def _check_keys(inputs: Mapping[str, str], micro_batch: MicroBatch) -> None:
    missing = [key for key in inputs.values() if key not in micro_batch.tensors]
    if missing:
        raise JobError(
            f"inputs names {missing[0]!r}, and a batch has the keys {', '.join(map(repr, micro_batch.tensors))}.",
            "The model is called with the batch's keys named in Job.inputs.",
            "Correct inputs=, or what the data's samples are called.",
        )


def _check_total(total: Any) -> None:
    if not isinstance(total, Tensor) or total.ndim:
        what = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise LossError(
            f"the loss's total(output, batch) returned {what}.", "It is one number, the sum.", "Sum over all samples."
        )
    if not total.requires_grad:
        raise LossError(
            "the loss's total(output, batch) does not depend on any trained parameter.",
            "Training follows its gradient.",
            "Do not detach the output, and compute the loss from it.",
        )


def _check_sum(engine: Engine, tensors: Mapping[str, Tensor], num_samples: int) -> None:
    """Compares the loss of a batch with that of its two halves (a single sample: with the same one twice)."""
    whole: Mapping[str, Tensor] = tensors
    parts: Sequence[Mapping[str, Tensor]]
    if num_samples > 1:
        parts = [_rows(tensors, 0, num_samples // 2), _rows(tensors, num_samples // 2, num_samples)]
        sizes = [num_samples // 2, num_samples - num_samples // 2]
    else:
        whole = {key: torch.cat([tensor, tensor]) for key, tensor in tensors.items()}
        parts, sizes = [tensors, tensors], [1, 1]
    (together,), (weight,) = _totals_and_weights(engine, [whole])
    totals, weights = _totals_and_weights(engine, parts)
    if weight != sum(weights):
        raise LossError(
            f"the loss's weight is {weight:g} for a batch and {sum(weights):g} for its two halves together.",
            "A weight is a count: that of a batch is the sum of its parts' weights.",
            "Count samples, or the tokens that are not ignored.",
        )
    tolerance = 0.02 if engine.precision in ("bf16", "fp16") else 1e-3
    if math.isfinite(together) and math.isclose(together, sum(totals), rel_tol=tolerance):
        return
    is_mean = any(_is_mean(together, totals, counts, tolerance) for counts in (weights, sizes))
    if not is_mean and not all(math.isfinite(total) for total in (together, *totals)):
        raise NumericsError(
            f"the loss of the first micro-batch is {together:g}, that of its halves {totals[0]:g} and {totals[1]:g}.",
            "Training follows a finite loss; a mean over labels that are all ignored is not one, their sum is 0.",
            'Look at the data and the model\'s first output, and let total() use reduction="sum".',
        )
    raise _no_sum(together, sum(totals), is_mean=is_mean)


def _is_mean(together: float, totals: Sequence[float], counts: Sequence[float], tolerance: float) -> bool:
    # The mean over nothing is not a number, and no part of the other.
    summed = sum(total * count for total, count in zip(totals, counts, strict=True) if count)
    return sum(counts) > 0 and math.isclose(together * sum(counts), summed, rel_tol=tolerance)


def _no_sum(together: float, apart: float, *, is_mean: bool) -> LossError:
    shown = f"the loss's total is {together:.6g} for a batch and {apart:.6g} for its two halves together"
    if is_mean:
        return LossError(
            f"{shown}: total() returns a mean.",
            "A loss is a sum; the engine divides by the weight of the whole global batch, so that every cut is equal.",
            'Use reduction="sum" and let weight(batch) say what the sum is divided by.',
        )
    return LossError(
        f"{shown}.",
        "A loss is a sum over samples, each computed from its own sample alone.",
        "Sum over samples, and let no sample of a batch change the output of another.",
    )


def _rows(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {key: tensor[start:stop] for key, tensor in tensors.items()}


def _totals_and_weights(engine: Engine, batches: Sequence[Mapping[str, Tensor]]) -> tuple[list[float], list[float]]:
    totals = [float(engine.loss.total(engine.forward(batch), batch)) for batch in batches]
    return totals, [_read_weight(engine.loss.weight(batch)) for batch in batches]


def _read_weight(weight: Any) -> float:
    if not isinstance(weight, Tensor) or weight.ndim:
        what = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise LossError(
            f"the loss's weight(batch) returned {what}.",
            "It is a scalar tensor: what the sum over this batch is divided by.",
            "Return, for example, (labels != -100).sum().",
        )
    if float(weight) < 0:
        raise LossError(
            f"the loss's weight(batch) returned {float(weight):g}.",
            "A weight counts; divided by a negative one, the loss would rise.",
            "Return a count, and put the sign into total().",
        )
    return float(weight)
