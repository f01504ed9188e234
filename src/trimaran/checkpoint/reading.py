"""A checkpoint as it lies on disk: its manifest, its files verified, and any box of any tensor."""

from __future__ import annotations

import math
import os
import reprlib
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trimaran.checkpoint.parts import local_part, rows_in_order
from trimaran.checkpoint.shard_file import DTYPES, digest_file
from trimaran.errors import CheckpointError
from trimaran.records import FileRecord, Manifest, PartRecord, StateRecord, TensorRecord, read_manifest, read_state
from trimaran.tensor_plan import DealtRows

_NUM_THREADS = 4
"""More than a rank has cores, perhaps: some wait for the disk while others compute digests."""


def read_whole_manifest(folder: Path) -> tuple[Manifest, StateRecord]:
    """Manifest and state of a checkpoint all of whose files are there in their sizes; no tensor is read.

    Raises CheckpointError that says what is wrong with it.
    """
    if os.path.islink(folder):
        raise _refusal(folder, "is a link")
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        path = folder / name
        try:
            about = path.lstat()
        except OSError as problem:
            missing = isinstance(problem, FileNotFoundError)
            raise _refusal(path, "is missing" if missing else f"cannot be read: {problem.strerror}") from problem
        if not stat.S_ISREG(about.st_mode):
            raise _refusal(path, "is a link" if stat.S_ISLNK(about.st_mode) else "is no file")
        if about.st_size != file.num_bytes:
            raise _refusal(path, f"has {about.st_size} bytes; it was written with {file.num_bytes}")
    state = read_state(folder)
    if state.step != manifest.step:
        raise _refusal(folder, f"has state of step {state.step} and a manifest of step {manifest.step}")
    return manifest, state


def verify_files(folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Raises CheckpointError for the first of these files whose bytes are not those that were written."""
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for name, found in zip(names, threads.map(lambda name: _digest(folder / name), names), strict=True):
            if found != manifest.files[name]:
                raise _refusal(
                    folder / name, f"has SHA-256 {found.sha256[:12]}…, not {manifest.files[name].sha256[:12]}…"
                )


def _digest(path: Path) -> FileRecord:
    try:
        return digest_file(path)
    except OSError as problem:
        raise _refusal(path, f"cannot be read: {problem.strerror}") from problem


@dataclass(frozen=True)
class CheckpointReader:
    """Reads tensors of a verified checkpoint, each part only as far as it is asked for."""

    folder: Path
    manifest: Manifest
    _files: ExitStack
    _open: dict[str, Any] = field(default_factory=dict)

    def find(self, name: str) -> str | None:
        """The name under which a tensor was saved, which for a tied one may be another's; None where it was not."""
        return name if name in self.manifest.tensors else self.manifest.aliases.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape, with complex numbers as pairs."""
        return self._record(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The saved type of the numbers; of a complex tensor that of their parts."""
        return DTYPES[self._record(name).dtype]

    def is_complex(self, name: str) -> bool:
        """Whether the tensor was complex, and is saved as pairs."""
        return self._record(name).is_complex

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU, complex where it was."""
        record = self._record(name)
        tensor = self.read_box(name, (0,) * len(record.shape), record.shape)
        return torch.view_as_complex(tensor) if record.is_complex else tensor

    def read_into(self, target: Tensor, name: str, order: DealtRows | None = None) -> None:
        """Fills this rank's part of `target`, which has the whole tensor's shape, in its own type.

        `order` is that in which the target's rows lie on the ranks, where it is not the model's.
        """
        for local, offset in rows_in_order(*local_part(target), order):
            self._fill(local, name, offset)

    def read_box(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The numbers from `offset` on in `shape`, which must lie in the whole, on the CPU, in their saved type."""
        box = torch.empty(tuple(shape), dtype=self.dtype(name))
        self._fill(box, name, offset)
        return box

    def _fill(self, box: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copies the numbers from `offset` on into `box`, from where the files are mapped."""
        record = self._record(name)
        num_read = 0
        for part in record.parts:
            common = [
                (max(start, wanted), min(start + size, wanted + length))
                for start, size, wanted, length in zip(part.offset, part.shape, offset, box.shape, strict=True)
            ]
            if any(low >= high for low, high in common):
                continue
            target = tuple(slice(low - begin, high - begin) for (low, high), begin in zip(common, offset, strict=True))
            source = tuple(
                slice(low - begin, high - begin) for (low, high), begin in zip(common, part.offset, strict=True)
            )
            box[target] = self._slice(part, record.dtype, source)
            num_read += math.prod(high - low for low, high in common)
        if num_read != box.numel():
            raise ValueError(f"{name} of shape {record.shape} has no box of {tuple(box.shape)} at {tuple(offset)}")

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.tensors.get(name)
        if record is None:
            raise _refusal(self.folder, f"has no tensor {reprlib.repr(name)}")
        return record

    def _slice(self, part: PartRecord, dtype: str, source: tuple[slice, ...]) -> Tensor:
        path = self.folder / part.file
        try:
            if part.file not in self._open:
                self._open[part.file] = self._files.enter_context(safe_open(path, framework="pt"))
            held = self._open[part.file].get_slice(part.key)
            if tuple(held.get_shape()) != part.shape or held.get_dtype() != dtype:
                raise _refusal(path, f"holds {reprlib.repr(part.key)} in another shape or type than its manifest says")
            whole = all(each == slice(0, size) for each, size in zip(source, part.shape, strict=True))
            tensor: Tensor = self._open[part.file].get_tensor(part.key) if whole else held[source]
            return tensor
        except (SafetensorError, OSError, RuntimeError) as problem:  # the last for a file that is gone
            raise _refusal(path, f"cannot be read: {problem}") from problem


@contextmanager
def open_checkpoint(folder: Path, manifest: Manifest) -> Iterator[CheckpointReader]:
    """Opens a checkpoint for reading; files are opened as they are needed."""
    with ExitStack() as files:
        yield CheckpointReader(folder, manifest, files)


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}.", "A checkpoint is read whole, as it was written, or not at all.", "Use another checkpoint."
    )
