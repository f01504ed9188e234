"""Built-in sources of token windows: the interpreter's own source text, and a memory-mapped file of token ids."""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimaran.errors import DataError

_DIGEST_BLOCK_BYTES = 2**20
_MAX_DIGEST_BLOCKS = 64
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class _Windows:
    """Non-overlapping windows of `tokens` [num_tokens], an integer array; a shorter rest at its end is left out.

    A sample is {"input_ids": int64 [seq_len]}. Raises DataError where there is not one window.
    """

    def __init__(self, tokens: NDArray[Any], seq_len: int, name: str) -> None:
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len}.", "It counts the tokens of a sample.", "Give a whole number from 1.")
        if len(tokens) < seq_len:
            raise DataError(
                f"{name} has {len(tokens)} tokens, fewer than seq_len={seq_len}.",
                "A sample is a window of seq_len tokens.",
                "Give a smaller seq_len, or more text.",
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.name = name

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        window = self.tokens[index * self.seq_len : (index + 1) * self.seq_len]
        return {"input_ids": torch.from_numpy(window.astype(np.int64))}

    def fingerprint(self) -> str:
        """SHA-256 over the tokens, their type and seq_len; of more than 64 MiB, over 64 blocks spread evenly."""
        octets = self.tokens.view(np.uint8)
        digest = hashlib.sha256(f"{self.tokens.dtype.str} {len(self.tokens)} {self.seq_len}".encode())
        for start in _block_starts(len(octets)):
            digest.update(octets[start : start + _DIGEST_BLOCK_BYTES].data)
        return digest.hexdigest()


class PythonSource(_Windows):
    """Python source files as one text, byte by byte: a token is a byte."""

    vocab_size = 256

    def __init__(self, tokens: NDArray[np.uint8], files: Sequence[_File], seq_len: int) -> None:
        super().__init__(tokens, seq_len, f"The text of {len(files)} Python files")
        self._files = tuple(files)

    def split(self, valid: float = 0.05) -> tuple[PythonSource, PythonSource]:
        """(train, valid): whole files go to either side, `valid` of the bytes to the second; equal everywhere.

        Raises DataError where a side is shorter than one sample.
        """
        _check_fraction(valid)
        num_valid_bytes = round(valid * len(self.tokens))
        by_hash = sorted(self._files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
        bytes_before = itertools.accumulate((file.stop - file.start for file in by_hash), initial=0)
        held_out = {file for file, before in zip(by_hash, bytes_before, strict=False) if before < num_valid_bytes}
        return (
            self._only([file for file in self._files if file not in held_out]),
            self._only([file for file in self._files if file in held_out]),
        )

    def _only(self, files: Sequence[_File]) -> PythonSource:
        texts = [(file.name, self.tokens[file.start : file.stop]) for file in files]
        return PythonSource(*_join(texts), self.seq_len)


def python_source(seq_len: int = 256, root: str | Path | None = None) -> PythonSource:
    """Read the source of the running interpreter's standard library, or all .py files under `root`: real text, 30 MB.

    In the order of their paths; installed packages and files equal to an earlier one are left out. Raises DataError
    where there are none.
    """
    folder = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    texts = list(_distinct_texts(folder))
    if not texts:
        raise DataError(
            f"There is no Python source under {folder}.",
            "An interpreter may come without its library's source.",
            "Give root=, a folder with .py files.",
        )
    return PythonSource(*_join(texts), seq_len)


class TokenFile(_Windows):
    """A part of a memory-mapped file of token ids; workers and ranks on one machine share its pages."""

    def __init__(self, path: Path, seq_len: int, dtype: np.dtype[Any], start: int, stop: int) -> None:
        super().__init__(np.memmap(path, dtype=dtype, mode="r")[start:stop], seq_len, str(path))
        self._arguments = (path, seq_len, dtype, start, stop)

    def __reduce__(self) -> tuple[Any, ...]:
        # Sent to another process as its path: the array itself would be read and copied whole.
        return TokenFile, self._arguments

    def split(self, valid: float = 0.05) -> tuple[TokenFile, TokenFile]:
        """(train, valid): the last windows of the file, `valid` of them, are held out.

        Raises DataError where a side has no sample.
        """
        _check_fraction(valid)
        path, seq_len, dtype, start, stop = self._arguments
        middle = start + (len(self) - round(valid * len(self))) * seq_len
        return TokenFile(path, seq_len, dtype, start, middle), TokenFile(path, seq_len, dtype, middle, stop)


def token_file(path: str | Path, seq_len: int, dtype: str = "uint16") -> TokenFile:
    """Map a file of bare token ids, one integer of `dtype` after the other, in this machine's byte order.

    Raises DataError for a file that is missing, has a header, or is not a whole number of tokens.
    """
    path = Path(path)
    kind = _integer_dtype(dtype)
    if not path.is_file():
        raise DataError(f"{path} is not a file.", "token_file maps a file of token ids.", "Check the path.")
    num_bytes = path.stat().st_size
    if num_bytes % kind.itemsize:
        raise DataError(
            f"{path} has {num_bytes} bytes, no multiple of {kind.itemsize}.",
            f"A token of dtype {dtype} takes {kind.itemsize} bytes.",
            "Give the dtype it was written with, or write it again: it may be cut short.",
        )
    if num_bytes == 0:
        raise DataError(f"{path} is empty.", "It holds token ids.", "Write it again.")
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise DataError(
                f"{path} is a .npy file.", "Its header would be read as tokens.", "Write it with array.tofile(path)."
            )
    return TokenFile(path, seq_len, kind, 0, num_bytes // kind.itemsize)


@dataclass(frozen=True)
class _File:
    """A file's place in the concatenated text."""

    name: str
    start: int
    stop: int


def _distinct_texts(folder: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """(path below the folder, bytes) of each file that is not empty and not equal to one before."""
    seen: set[bytes] = set()
    for name in sorted(_python_files(folder)):
        text = _read(folder / name)
        key = hashlib.sha256(text).digest()
        if text and key not in seen:
            seen.add(key)
            yield name, np.frombuffer(text, np.uint8)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}.",
            "All Python files of the folder are part of the text, on every rank.",
            "Make it readable, or give another root=.",
        ) from error


def _python_files(folder: Path) -> Iterator[str]:
    """Paths below the folder, with slashes. Folders of installed packages, which may be huge, are not entered."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY]
        below = Path(parent).relative_to(folder)
        yield from ((below / name).as_posix() for name in files if name.endswith(".py"))


def _join(texts: Sequence[tuple[str, NDArray[np.uint8]]]) -> tuple[NDArray[np.uint8], list[_File]]:
    """The texts one after the other, and where each one lies."""
    stops = list(itertools.accumulate(len(text) for _, text in texts))
    files = [_File(name, stop - len(text), stop) for (name, text), stop in zip(texts, stops, strict=True)]
    tokens = np.concatenate([text for _, text in texts]) if texts else np.zeros(0, np.uint8)
    return tokens, files


def _integer_dtype(name: str) -> np.dtype[Any]:
    try:
        kind = np.dtype(name)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise DataError(
            f"dtype={name!r} is no integer type.",
            "Token ids are whole numbers.",
            'Give "uint16", "uint32", "int32" or "int64".',
        )
    return kind


def _check_fraction(valid: float) -> None:
    if not 0 < valid < 1:
        raise DataError(f"valid={valid}.", "It is the fraction held out.", "Give a number between 0 and 1, as 0.05.")


def _block_starts(num_bytes: int) -> Sequence[int]:
    """Where the blocks of a digest start: side by side where few blocks cover all, else spread from end to end."""
    if num_bytes <= _MAX_DIGEST_BLOCKS * _DIGEST_BLOCK_BYTES:
        return range(0, num_bytes, _DIGEST_BLOCK_BYTES)
    last = num_bytes - _DIGEST_BLOCK_BYTES
    return [last * number // (_MAX_DIGEST_BLOCKS - 1) for number in range(_MAX_DIGEST_BLOCKS)]
