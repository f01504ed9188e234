"""Weights out: a model's tensors as one safetensors file, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file, save_model
from torch import nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes parameters and persistent buffers under their own names; tensors that are tied are stored once."""
    temporary = _temporary(path)
    save_model(model, str(temporary))
    _commit(temporary, path)


def save_trained_weights(model: nn.Module, path: Path) -> None:
    """Writes only the parameters that require a gradient: of an adapted model, the adapters."""
    trained = {name: each.detach().contiguous() for name, each in model.named_parameters() if each.requires_grad}
    temporary = _temporary(path)
    save_file(trained, temporary, metadata={"format": "pt"})
    _commit(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _commit(temporary: Path, path: Path) -> None:
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
