"""One safetensors file, written as a stream: no copy of its tensors in memory, and its SHA-256 on the way.

The format is eight bytes of header length, a JSON header, and the tensors' bytes one after the other
(github.com/huggingface/safetensors, "Format"). `safetensors` itself writes it only from a whole dictionary.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimaran.records import FileRecord

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_CHUNK_BYTES = 2**23
_MOST_QUEUED = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor of the file, known before its bytes are: `dtype` in safetensors' words."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def write_shard(
    path: Path,
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    halfway: Callable[[], None] = lambda: None,
    before_flush: Callable[[], None] = lambda: None,
) -> FileRecord:
    """Writes a new file, readable by its owner alone, and flushes it to disk; returns its size and SHA-256.

    `tensors` gives one tensor for each entry, in order, on the CPU; only one is held at a time. Raises OSError, and
    leaves what it wrote: the caller's directory is not committed. Raises ValueError for a key that comes twice.
    """
    header = _header(entries, metadata or {})
    middle = sum(entry.num_bytes for entry in entries) // 2
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file, _Hasher() as hasher:
        hasher.add(header)
        _write_all(file.fileno(), header)
        written, passed_middle = 0, False
        for entry, tensor in zip(entries, tensors, strict=True):
            for chunk in _chunks(tensor, entry):
                hasher.add(chunk)
                _write_all(descriptor, chunk)
                written += len(chunk)
                if written >= middle and not passed_middle:
                    passed_middle = True
                    halfway()
        before_flush()
        os.fsync(descriptor)
        num_bytes = len(header) + written
        digest = hasher.digest()
    return FileRecord(num_bytes, digest)


def digest_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file as it lies on disk."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
    return FileRecord(num_bytes, digest.hexdigest())


class _Hasher:
    """SHA-256 on a thread of its own, beside the writing: both release the interpreter's lock.

    It reads the chunks in place, so they must not change before `digest`.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        # Bounded, so that a slow hash does not keep tensors alive that were written long ago.
        self._chunks: queue.Queue[memoryview | bytes | None] = queue.Queue(_MOST_QUEUED)
        self._thread = threading.Thread(target=self._run, name="sha256", daemon=True)

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.put(None)
        self._thread.join()

    def add(self, chunk: memoryview | bytes) -> None:
        self._chunks.put(chunk)

    def digest(self) -> str:
        """The digest of all that was added; waits for it."""
        self._chunks.put(None)
        self._thread.join()
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._digest.update(chunk)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    values: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for entry in entries:
        if entry.key in values:
            raise ValueError(f"{entry.key} comes twice in one file")
        offsets = [at, at + entry.num_bytes]
        values[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor, entry: Entry) -> Iterable[memoryview]:
    if DTYPE_NAMES.get(tensor.dtype) != entry.dtype or tensor.nbytes != entry.num_bytes:
        raise ValueError(f"{entry.key} is {tensor.dtype} {tuple(tensor.shape)}, announced as {entry}")
    if entry.num_bytes == 0:
        return
    whole: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(whole), _CHUNK_BYTES):
        yield whole[start : start + _CHUNK_BYTES]


def _write_all(descriptor: int, chunk: memoryview | bytes) -> None:
    view = memoryview(chunk)
    while len(view):
        view = view[os.write(descriptor, view) :]
