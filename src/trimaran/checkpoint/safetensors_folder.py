"""Safetensors on disk as one collection of named tensors, read one at a time: a file, a folder, a sharded index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_DIGEST_BYTES = 2**20


@dataclass(frozen=True)
class TensorReader:
    """Open safetensors files: each tensor's name, shape and kind of number, and the tensor itself when asked for."""

    shapes: Mapping[str, tuple[int, ...]]
    is_floating_point: Mapping[str, bool]
    _holders: Mapping[str, Any]

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU; only its bytes are read."""
        tensor: Tensor = self._holders[name].get_tensor(name)
        return tensor


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    """Opens the file, the folder's only file, or the files its index names. Reads their headers, no tensor.

    Raises CheckpointError for what is missing, damaged, or no safetensors. A file of an index lies in its folder.
    """
    holders: dict[str, Any] = {}
    index = _find_index(path)
    places = {} if index is None else _read_index(index)
    with ExitStack() as files:
        for file in find_files(path):
            try:
                opened = files.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as problem:
                raise CheckpointError(
                    f"{file} cannot be read as safetensors: {problem}.",
                    "Weights are read from safetensors, which hold tensors and nothing that runs.",
                    "Convert the weights (other formats run code when they are loaded), or give another path.",
                ) from problem
            # A name that lies in several files is read from the one that the index says.
            names = opened.keys()
            holders |= {name: opened for name in names if places.get(name, file.name) == file.name}
        headers = {name: each.get_slice(name) for name, each in holders.items()}
        yield TensorReader(
            shapes={name: tuple(each.get_shape()) for name, each in headers.items()},
            is_floating_point={name: "F" in each.get_dtype() for name, each in headers.items()},  # F32, BF16, F8_E4M3
            _holders=holders,
        )


def find_files(path: Path) -> list[Path]:
    """The safetensors files that a path stands for, sorted."""
    index = _find_index(path)
    if index is not None:
        return _indexed_files(index)
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files
    held = f"{len(files)} safetensors files and no {INDEX_FILE}" if files else "no safetensors"
    raise CheckpointError(
        f"{path} holds {held}." if path.is_dir() else f"{path} does not exist.",
        "Weights are one safetensors file, or several with an index that says what lies where.",
        "Give the file itself." if files else "Check the path.",
    )


def digest_files(path: Path) -> str:
    """A digest that tells other weights: of each file's size, its first and its last MiB (header and ends)."""
    digest = hashlib.sha256()
    for file in find_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(_DIGEST_BYTES))
            content.seek(max(0, size - _DIGEST_BYTES))
            digest.update(content.read())
    return digest.hexdigest()


def _find_index(path: Path) -> Path | None:
    if path.is_file():
        return path if path.name.endswith(".index.json") else None
    return path / INDEX_FILE if (path / INDEX_FILE).is_file() else None


def _read_index(index: Path) -> Mapping[str, str]:
    """Tensor name -> name of the file beside the index."""
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise CheckpointError(
            f"{index} is no index of safetensors: {type(problem).__name__}: {problem}.",
            'It holds "weight_map": tensor name -> file name.',
            "Give the folder as save_pretrained wrote it.",
        ) from problem
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {name!r}.", "Files of an index lie beside it.", "Do not trust this folder."
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent / name} is missing.", f"{index.name} says that tensors lie in it.", "Fetch it again."
            )
    return places


def _indexed_files(index: Path) -> list[Path]:
    return [index.parent / name for name in sorted(set(_read_index(index).values()))]
