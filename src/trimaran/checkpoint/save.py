"""Weights out: a model's tensors as one safetensors file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.checkpoint.parts import rows_in_order
from trimaran.checkpoint.state import find_ties
from trimaran.errors import CheckpointError
from trimaran.tensor_plan import DealtRows


def save_weights(model: nn.Module, path: Path | None, dealt: Mapping[str, DealtRows] | None = None) -> None:
    """Writes parameters and persistent buffers; what is tied once, by its first name, as `save_pretrained` does.

    Where they are cut every rank must call it; `path` is None on those that give their parts and write nothing. `dealt`
    are the orders of parameters' rows on the ranks, by name, where they are not the model's.
    """
    tensors: dict[str, Tensor] = {}
    memories: set[int] = set()
    state = model.state_dict()
    for name, first in find_ties(model, state).items():
        if name == first:
            whole = _gather(state[name], (dealt or {}).get(name))
            memory = whole.untyped_storage().data_ptr()
            # A part of another tensor is written as one of its own: safetensors refuses what overlaps.
            tensors[name] = whole.clone() if memory in memories else whole
            memories.add(memory)
    _write(tensors, path)


def save_trained_weights(model: nn.Module, path: Path | None, dealt: Mapping[str, DealtRows] | None = None) -> None:
    """Writes only the parameters that require a gradient: of an adapted model, the adapters. Called as the other."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    _write({name: _gather(each, (dealt or {}).get(name)) for name, each in trained.items()}, path)


def _gather(tensor: Tensor, order: DealtRows | None) -> Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor().cpu()
    if order is None:
        return gathered
    whole = torch.empty_like(gathered)
    for rows, offset in rows_in_order(gathered, (0,) * gathered.dim(), order):
        whole[offset[0] : offset[0] + rows.shape[0]] = rows
    return whole


def _write(tensors: Mapping[str, Tensor], path: Path | None) -> None:
    """Raises CheckpointError where the file cannot be written; an older one is then as it was."""
    if path is None:
        return
    for name, each in tensors.items():
        if each.dtype is torch.complex128:
            raise CheckpointError(
                f"{path} cannot hold {name}, which is complex in double precision.",
                "Safetensors have no such numbers; a checkpoint holds them as pairs of real ones.",
                "Continue the run in fp32 for a file of weights, or keep them in the model as pairs.",
            )
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file({name: each.contiguous() for name, each in tensors.items()}, temporary, metadata={"format": "pt"})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as problem:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written: {problem}.",
            "Weights are written whole, beside an older file, or not at all.",
            "Make room on that disk, or choose another --run.",
        ) from problem
