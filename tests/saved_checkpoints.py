"""Checkpoints built by hand: cut into odd boxes, as data- and tensor-parallel ranks leave them, tied names once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.checkpoint.shard_file import DTYPE_NAMES, Entry, digest_file, write_shard
from trimaran.records import (
    Manifest,
    PartRecord,
    RunRecord,
    StateRecord,
    TensorRecord,
    name_checkpoint,
    to_text,
    write_run,
)

NUM_FILES = 3
ROW_CUTS, COLUMN_CUTS = (0.0, 0.4, 0.4, 1.0), (0.0, 0.7, 1.0)  # one of the boxes is empty


def save_by_hand(
    run: Path,
    model: nn.Module,
    *,
    step: int = 100,
    hugging_face: Mapping[str, Any] | None = None,
    trained: Sequence[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `run`/checkpoints/step-… of a model and some optimizer state; returns its folder."""
    folder = run / "checkpoints" / name_checkpoint(step)
    folder.mkdir(parents=True)
    record = RunRecord("by hand", "a", identity={}, layout="", options={}, derived={}, machine={}, versions={})
    write_run(run / "run.json", record)
    names = [name for name, each in model.named_parameters() if each.requires_grad] if trained is None else trained
    tensors, aliases = _collect(model, names)
    records, boxes = {}, [[] for _ in range(NUM_FILES)]
    for index, (name, tensor) in enumerate(tensors.items()):
        parts = []
        is_complex = tensor.is_complex()
        tensor = torch.view_as_real(tensor) if is_complex else tensor
        for number, (offset, box) in enumerate(_boxes(tensor)):
            file = (index + number) % NUM_FILES
            key = f"{name}@{number}"
            boxes[file].append((Entry(key, DTYPE_NAMES[box.dtype], tuple(box.shape), box.nbytes), box))
            parts.append(PartRecord(f"shard-{file}.safetensors", key, offset, tuple(box.shape)))
        records[name] = TensorRecord(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tuple(parts), is_complex)
    files = {
        (name := f"shard-{index}.safetensors"): write_shard(
            folder / name, [entry for entry, _ in each], [box for _, box in each]
        )
        for index, each in enumerate(boxes)
    }
    state = StateRecord(
        step=step,
        position=step,
        num_updates=step,
        loss_scale=None,
        optimizer={},
        model=extra or {},
        trained=tuple(names),
        layout="dp=3",
        time="2026-01-01T00:00:00+00:00",
        hugging_face=hugging_face or {},
    )
    (folder / "state.json").write_text(to_text(state))
    files["state.json"] = digest_file(folder / "state.json")
    manifest = Manifest(run_id="a", epoch=1, step=step, files=files, tensors=records, aliases=aliases)
    (folder / "manifest.json").write_text(to_text(manifest))
    return folder


def _collect(model: nn.Module, trained: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor by its name in a checkpoint, and the names that stand for another's."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    state = model.state_dict()
    for name, each in state.items():
        place = (each.data_ptr(), each.shape, each.stride())
        if each.numel() and place in first:
            aliases[f"model.{name}"] = first[place]
        else:
            first[place] = f"model.{name}"
            tensors[f"model.{name}"] = each
    tensors |= {f"buffer.{name}": each for name, each in model.named_buffers() if name not in state}
    tensors |= {f"optimizer.{name}.exp_avg": torch.rand_like(model.get_parameter(name)) for name in trained}
    return tensors, aliases


def _boxes(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Where each box begins, and the box."""
    if tensor.dim() == 0:
        yield (), tensor
        return
    rows = [round(cut * tensor.shape[0]) for cut in ROW_CUTS]
    for top, bottom in itertools.pairwise(rows):
        strip = tensor[top:bottom]
        if tensor.dim() == 1:
            yield (top,), strip
            continue
        columns = [round(cut * tensor.shape[1]) for cut in COLUMN_CUTS]
        for left, right in itertools.pairwise(columns):
            yield (top, left, *(0,) * (tensor.dim() - 2)), strip[:, left:right]
