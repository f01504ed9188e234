"""First weights: a function of (seed, job), never of the layout or the host (invariant 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trimaran.errors import JobError
from trimaran.world.rng import seed_everything


def build_model(constructor: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model on the CPU, its constructor run under the seed as in plain PyTorch.

    Raises JobError where the constructor returns no module, or one without a parameter to train.
    """
    seed_everything(seed)
    model = constructor()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model() returned {type(model).__name__}.",
            "It builds the torch module that is trained.",
            "Return an nn.Module.",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(
            f"{type(model).__name__} has no parameter that requires a gradient.",
            "Training changes parameters.",
            "Set requires_grad on those to be trained.",
        )
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise JobError(
            f"parameter {lazy[0]} has no shape yet (a lazy module).",
            "Weights exist before the first batch, so that they depend on the seed alone.",
            "Use the module with explicit sizes.",
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise JobError(
                f"parameter {name} is on the meta device.",
                'With init="whole" the constructor gives the weights their values.',
                "Build the model on the CPU.",
            )
    return model


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every floating-point parameter this type, in place; buffers too where it is float64."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    if dtype is torch.float64:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module.register_buffer(name, buffer.to(dtype), name not in module._non_persistent_buffers_set)
