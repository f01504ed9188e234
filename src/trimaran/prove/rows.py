"""Do samples of a batch touch each other? One sample's inputs are replaced, and the other samples' outputs compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.batch import MicroBatch
from trimaran.engine import Engine
from trimaran.engine.buffers import unchanged_buffers

_RELATIVE_CHANGE = 1e-5
"""Of the largest output: above what float32 rounds, where values make a kernel take another path."""


def exchange(tensors: Mapping[str, Tensor], keys: list[str]) -> dict[str, Tensor] | None:
    """The batch with its last sample's inputs replaced by those of another sample that differs; None without one."""
    num_samples = len(tensors[keys[0]])
    for donor in range(num_samples - 1):
        if any(not torch.equal(tensors[key][donor], tensors[key][-1]) for key in keys):
            return {**tensors, **{key: torch.cat([tensors[key][:-1], tensors[key][donor, None]]) for key in keys}}
    return None


def find_mixing(engine: Engine, micro_batch: MicroBatch, changed: Mapping[str, Tensor]) -> str | None:
    """The name of the innermost module that mixes samples ("" is the model itself), None where none does.

    `changed` is the batch with its last sample exchanged, on the device; `can_compare` must hold. Runs in the mode the
    model is in and leaves no trace. Modules are looked through only where the outputs differ.
    """
    tensors = engine.to_device(micro_batch)
    first, second = (_run(engine, micro_batch, inputs) for inputs in (tensors, changed))
    if not _others_differ(first, second):
        return None
    with _watched(engine.model, micro_batch.num_samples) as before:
        _run(engine, micro_batch, tensors)
    with _watched(engine.model, micro_batch.num_samples) as after:
        _run(engine, micro_batch, changed)
    for (name, inputs, outputs), (_, other_inputs, other_outputs) in zip(before, after, strict=False):
        if inputs and not _others_differ(inputs, other_inputs) and _others_differ(outputs, other_outputs):
            return name
    return ""


def can_compare(engine: Engine, micro_batch: MicroBatch) -> bool:
    """Whether the model's output has one row for each sample, and is the same for the same inputs and seed."""
    tensors = engine.to_device(micro_batch)
    first, second = (_run(engine, micro_batch, tensors) for _ in range(2))
    return bool(first) and not _others_differ(first, second)


def _run(engine: Engine, micro_batch: MicroBatch, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The rows of the model's output, under the same random numbers each time."""
    engine.seed_micro_batch(0, micro_batch)
    with torch.no_grad(), unchanged_buffers(engine.model):
        return _rows(engine.forward(tensors), micro_batch.num_samples)


def _rows(value: Any, num_samples: int) -> list[Tensor]:
    """The tensors in it whose first dimension counts the samples."""
    if isinstance(value, Tensor):
        return [value] if value.ndim > 0 and len(value) == num_samples else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [row for each in value for row in _rows(each, num_samples)]
    logits = getattr(value, "logits", None)
    return _rows(logits, num_samples) if isinstance(logits, Tensor) else []


def _others_differ(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether rows of samples other than the last differ by more than rounding."""
    for one, other in zip(first, second, strict=False):
        if one.shape != other.shape:
            return True
        if one.numel() == 0:
            continue
        one, other = one.cpu().double(), other.cpu().double()  # not every device has float64
        if ((one[:-1] - other[:-1]).abs() > _RELATIVE_CHANGE * one.abs().amax().nan_to_num(0.0)).any():
            return True
    return False


@contextmanager
def _watched(model: nn.Module, num_samples: int) -> Iterator[list[tuple[str, list[Tensor], list[Tensor]]]]:
    """Inside, every module's call adds (name, input rows, output rows), those of inner modules first."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # Copies: a later operation may write into them in place.
            inputs = [each.detach().clone() for each in _rows([*args, *kwargs.values()], num_samples)]
            calls.append((name, inputs, [each.detach().clone() for each in _rows(output, num_samples)]))

        return hook

    hooks = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
