"""Weights out: a model's tensors as one safetensors file, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes parameters and persistent buffers; what is tied once, by its first name, as `save_pretrained` does."""
    tensors: dict[str, Tensor] = {}
    written: set[tuple[int, torch.Size]] = set()
    for name, each in model.state_dict().items():
        place = (each.data_ptr(), each.shape)
        if each.numel() == 0 or place not in written:
            tensors[name] = each.detach().contiguous()
        written.add(place)
    temporary = _temporary(path)
    save_file(tensors, temporary, metadata={"format": "pt"})
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
