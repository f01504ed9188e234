"""What training keeps in memory besides activations, in bytes on this rank."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimaran.engine.local import local_tensor


@dataclass(frozen=True)
class StateBytes:
    """Bytes that live from step to step: parameters, gradients, optimizer state (None: it cannot be foretold)."""

    parameters: int
    gradients: int
    optimizer: int | None


def predict_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateBytes:
    """Predicts what the first step will have allocated, by stepping the same optimizer on a tiny parameter."""
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = sum(_bytes(each) for each in trained)
    try:
        per_byte = _state_per_parameter_byte(optimizer, trained[0])
    except Exception:  # a foreign optimizer that wants more than parameters and its defaults; nothing depends on it
        return StateBytes(sum(_bytes(each) for each in model.parameters()), gradients, None)
    return StateBytes(sum(_bytes(each) for each in model.parameters()), gradients, round(per_byte * gradients))


def measure_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state as it is now."""
    return sum(_bytes(value) for state in optimizer.state.values() for value in state.values() if _is_tensor(value))


def _state_per_parameter_byte(optimizer: torch.optim.Optimizer, like: Tensor) -> float:
    probe = nn.Parameter(torch.zeros(64, 64, dtype=like.dtype, device=like.device))
    probe.grad = torch.zeros_like(probe)
    takes = inspect.signature(type(optimizer)).parameters
    twin = type(optimizer)([probe], **{name: each for name, each in optimizer.defaults.items() if name in takes})
    twin.step()
    return measure_state_bytes(twin) // _bytes(probe)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _bytes(tensor: Tensor) -> int:
    """On this rank, where it is cut over several."""
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
