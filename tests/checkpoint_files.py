"""Checkpoints made without training and without flushing, and ways to damage and to forge them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.checkpoint.shard_file import DTYPE_NAMES, Entry, digest_file, write_shard
from trimaran.records import Manifest, PartRecord, StateRecord, TensorRecord, name_checkpoint, to_text

RUN_ID = "0123456789abcdef"
SHARD = "rank-00000-of-00001.safetensors"


def make_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    run_id: str = RUN_ID,
    epoch: int = 1,
    validation: Mapping[str, float] | None = None,
    optimizer: Mapping[str, Any] | None = None,
) -> Path:
    """A whole checkpoint of these tensors, in one file; without any it has no such file. Returns its folder."""
    folder = run / "checkpoints" / name_checkpoint(step)
    folder.mkdir(parents=True)
    tensors = tensors or {}
    state = StateRecord(
        step=step,
        position=8 * step,
        num_updates=step,
        loss_scale=None,
        optimizer=optimizer or {},
        model={},
        trained=(),
        layout="dp=1",
        time="2026-01-01T00:00:00+00:00",
        validation=validation,
    )
    (folder / "state.json").write_text(to_text(state))
    files = {"state.json": digest_file(folder / "state.json")}
    if tensors:
        entries = [
            Entry(name, DTYPE_NAMES[each.dtype], tuple(each.shape), each.nbytes) for name, each in tensors.items()
        ]
        files[SHARD] = write_shard(folder / SHARD, entries, tensors.values())
    records = {
        name: TensorRecord(
            DTYPE_NAMES[each.dtype],
            tuple(each.shape),
            (PartRecord(SHARD, name, (0,) * each.dim(), tuple(each.shape)),),
        )
        for name, each in tensors.items()
    }
    manifest = Manifest(run_id=run_id, epoch=epoch, step=step, files=files, tensors=records, aliases={})
    (folder / "manifest.json").write_text(to_text(manifest))
    return folder


def entry(key: str, tensor: Tensor) -> Entry:
    """How a tensor is announced to `write_shard`."""
    return Entry(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def some_tensors() -> dict[str, Tensor]:
    """A few of different types and shapes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.w": torch.randn(6, 4, generator=generator),
        "model.half": torch.randn(3, generator=generator).bfloat16(),
        "model.count": torch.tensor(7),
        "model.empty": torch.empty(0, 3),
    }


def write_sealed(folder: Path, text: str) -> None:
    """Writes a manifest of this text with its right seal, as somebody can who means harm."""
    assert text[0] == "{"
    seal = hashlib.sha256(text[1:].encode()).hexdigest()
    (folder / "manifest.json").write_text(f'{{"sha256": "{seal}", {text[1:]}')


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and seals it again; what its files are is taken from those that lie there."""
    values = json.loads((folder / "manifest.json").read_text())
    del values["sha256"]
    for name in values["files"]:
        if (folder / name).is_file():
            found = digest_file(folder / name)
            values["files"][name] = {"num_bytes": found.num_bytes, "sha256": found.sha256}
    change(values)
    write_sealed(folder, json.dumps(values) + "\n")


def forge_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a state.json, and the manifest with it."""
    values = json.loads((folder / "state.json").read_text())
    change(values)
    (folder / "state.json").write_text(json.dumps(values))
    forge_manifest(folder, lambda manifest: None)


def flip_bit(path: Path, *, byte: int, bit: int = 0) -> None:
    """Changes one bit in place; size and times stay, as when a disk rots. A negative byte counts from the end."""
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
