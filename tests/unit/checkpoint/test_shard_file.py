"""One safetensors file: written as a stream, read by safetensors, its digest that of the bytes on disk."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_files import entry
from trimaran.checkpoint import shard_file
from trimaran.checkpoint.shard_file import DTYPE_NAMES, DTYPES, digest_file, write_shard
from trimaran.records import FileRecord
from trimaran.records.checkpoints import DTYPE_BYTES


def write(path: Path, tensors: dict[str, Tensor], **hooks: object) -> FileRecord:
    return write_shard(path, [entry(key, each) for key, each in tensors.items()], tensors.values(), **hooks)  # type: ignore[arg-type]


def test_every_kind_of_number_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert set(DTYPES) == set(DTYPE_BYTES)
    for name, dtype in DTYPES.items():
        assert dtype.itemsize == DTYPE_BYTES[name]
        raw = torch.arange(3 * 2 * dtype.itemsize, dtype=torch.uint8)
        tensor = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(3, 2)
        write(tmp_path / name, {"t": tensor})
        with safe_open(tmp_path / name, framework="pt") as file:
            assert file.get_slice("t").get_dtype() == name
            back = file.get_tensor("t")
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_odd_sizes_empty_and_strided_tensors_share_a_file(tmp_path: Path) -> None:
    tensors = {
        "three bytes": torch.tensor([True, False, True]),
        "after them": torch.randn(5),
        "turned": torch.randn(4, 6).t(),
        "every other": torch.arange(20)[::2],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "ünïcode": torch.ones(1),
    }
    write(tmp_path / "a", tensors)
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert file.metadata() == {"format": "pt"}
        for name, each in tensors.items():
            assert torch.equal(file.get_tensor(name), each), name


def test_the_record_is_that_of_the_file_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "_CHUNK_BYTES", 64)  # many chunks, and a last one that is shorter
    record = write(tmp_path / "a", {"a": torch.randn(100), "b": torch.randn(7)})
    data = (tmp_path / "a").read_bytes()
    assert record == FileRecord(len(data), hashlib.sha256(data).hexdigest()) == digest_file(tmp_path / "a")
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert set(load_file(tmp_path / "a")) == {"a", "b"}


def test_a_file_is_its_owners_alone_and_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a", {"a": torch.ones(2)})
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(FileExistsError):
        write(tmp_path / "a", {"a": torch.zeros(2)})
    assert (tmp_path / "a").read_bytes() == before
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(FileExistsError):
        write(tmp_path / "link", {"a": torch.ones(2)})
    assert (tmp_path / "outside").read_text() == "mine"


def test_what_was_announced_otherwise_is_refused(tmp_path: Path) -> None:
    announced = [entry("a", torch.ones(2))]
    for index, tensors in enumerate([[torch.ones(3)], [torch.ones(2).int()], [], [torch.ones(2), torch.ones(2)]]):
        with pytest.raises(ValueError, match=r"announced as|zip\(\)"):
            write_shard(tmp_path / str(index), announced, tensors)
    for key in ("a", "__metadata__"):
        with pytest.raises(ValueError, match=f"{key} comes twice"):
            write_shard(tmp_path / "twice", [entry(key, torch.ones(2)), *announced], [torch.ones(2)] * 2)
    with pytest.raises(KeyError):
        DTYPE_NAMES[torch.complex64]


def test_hooks_are_called_in_the_middle_and_before_the_flush(tmp_path: Path) -> None:
    sizes: list[tuple[str, int]] = []

    def note(name: str) -> None:
        sizes.append((name, (tmp_path / "a").stat().st_size))

    tensors = {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(100)}
    record = write(tmp_path / "a", tensors, halfway=lambda: note("halfway"), before_flush=lambda: note("flush"))
    header = record.num_bytes - 1200
    assert sizes == [("halfway", header + 800), ("flush", record.num_bytes)]


def test_an_error_midway_ends_the_hashing_and_leaves_what_was_written(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the disk went away")

    threads = threading.active_count()
    with pytest.raises(OSError, match="went away"):
        write(tmp_path / "a", {"a": torch.ones(8)}, halfway=fail)
    assert threading.active_count() == threads
    assert (tmp_path / "a").stat().st_size > 0


def test_a_slow_hash_holds_the_writing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every tensor of a file, copied to the host for it, would live until it is hashed."""
    may_hash = threading.Event()
    asked: list[int] = []

    class SlowHash:
        def update(self, chunk: object) -> None:
            may_hash.wait(10)

        def hexdigest(self) -> str:
            return "0" * 64

    def tensors() -> Iterator[Tensor]:
        for index in range(50):
            asked.append(index)
            yield torch.ones(4)

    monkeypatch.setattr(shard_file.hashlib, "sha256", SlowHash)
    entries = [entry(str(index), torch.ones(4)) for index in range(50)]
    writer = threading.Thread(target=write_shard, args=(tmp_path / "a", entries, tensors()))
    writer.start()
    writer.join(0.3)
    asked_by_then = len(asked)
    may_hash.set()
    writer.join()
    assert asked_by_then < 15
    assert asked == list(range(50))


def test_a_digest_of_a_large_file_is_that_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "_CHUNK_BYTES", 1000)
    data = os.urandom(12_345)
    (tmp_path / "a").write_bytes(data)
    assert digest_file(tmp_path / "a") == FileRecord(12_345, hashlib.sha256(data).hexdigest())
    (tmp_path / "b").write_bytes(b"")
    assert digest_file(tmp_path / "b").num_bytes == 0
