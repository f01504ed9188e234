"""A checkpoint on disk: whole or refused; any box of any tensor; nothing that it holds runs or leads away."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import SHARD, entry, flip_bit, forge_manifest, make_checkpoint, some_tensors
from trimaran.checkpoint.reading import open_checkpoint, read_whole_manifest, verify_files
from trimaran.checkpoint.shard_file import write_shard
from trimaran.errors import CheckpointError
from trimaran.records import Manifest, PartRecord, TensorRecord, read_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint."""
    return make_checkpoint(tmp_path / "run", 30, some_tensors())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """As a resume does it: manifest, bytes, tensors."""
    manifest, _ = read_whole_manifest(folder)
    verify_files(folder, manifest, list(manifest.files))
    with open_checkpoint(folder, manifest) as reader:
        return {name: reader.read(name) for name in manifest.tensors}


def refuse(folder: Path) -> str:
    """Why a checkpoint is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert caught.value.rule
    assert caught.value.remedy
    return caught.value.value


def test_a_whole_checkpoint_is_read(folder: Path) -> None:
    back = read_all(folder)
    for name, each in some_tensors().items():
        assert back[name].dtype == each.dtype
        assert torch.equal(back[name], each), name


@pytest.mark.parametrize("name", [SHARD, "state.json"])
@pytest.mark.parametrize("byte", [0, 8, 50, -1])
def test_a_flipped_bit_of_a_file_is_found(folder: Path, name: str, byte: int) -> None:
    flip_bit(folder / name, byte=byte, bit=1)
    said = refuse(folder)
    assert f"{folder / name} " in said
    assert "has SHA-256" in said or "is damaged" in said or "has format" in said


@pytest.mark.parametrize("name", [SHARD, "state.json"])
def test_a_file_of_another_length_is_found_without_reading_it(folder: Path, name: str) -> None:
    size = (folder / name).stat().st_size
    for length in (0, size - 1, size + 1):
        os.truncate(folder / name, length)
        with pytest.raises(CheckpointError, match=rf"{name} has {length} bytes; it was written with {size}"):
            read_whole_manifest(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    for name in (SHARD, "state.json", "manifest.json"):
        (folder / name).rename(folder / "away")
        assert refuse(folder) == f"{folder / name} is missing."
        (folder / "away").rename(folder / name)
    assert "is damaged (NotADirectoryError" in refuse(folder / SHARD)
    assert "manifest.json is missing" in refuse(folder.with_name("step-00000099"))


def test_state_of_another_step_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", 31, some_tensors())
    (folder / "state.json").write_bytes((other / "state.json").read_bytes())
    forge_manifest(folder, lambda manifest: None)
    assert refuse(folder) == f"{folder} has state of step 31 and a manifest of step 30."


def test_a_disk_that_cannot_be_read_is_a_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("trimaran.checkpoint.reading.digest_file", broken)
    assert refuse(folder).endswith("cannot be read: Input/output error.")


# ── Malice ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("write", [lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), torch.save])
def test_a_pickle_in_place_of_a_shard_does_not_run(folder: Path, tmp_path: Path, write: Callable[..., Any]) -> None:
    write(Bomb(tmp_path / "mark"), folder / SHARD)
    with pytest.raises(FileNotFoundError):
        (tmp_path / "mark").stat()
    os.truncate(folder / SHARD, max(1000, (folder / SHARD).stat().st_size))
    forge_manifest(folder, lambda manifest: None)
    assert f"{folder / SHARD} cannot be read" in refuse(folder)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_beside_the_files_is_nothing(folder: Path, tmp_path: Path) -> None:
    for name in ("model.pt", ".metadata", "data.pkl", "__init__.py"):
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    read_all(folder)
    assert not (tmp_path / "mark").exists()


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    for name in (SHARD, "state.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        assert refuse(folder).startswith(f"{folder / name} ")
        assert "is a link" in refuse(folder)
        (tmp_path / name).rename(folder / name)
    (folder / SHARD).rename(tmp_path / SHARD)
    (folder / SHARD).symlink_to("nowhere")
    assert "is a link" in refuse(folder)
    (folder / SHARD).unlink()
    (tmp_path / SHARD).rename(folder / SHARD)
    linked = tmp_path / "step-00000030"
    linked.symlink_to(folder)
    assert refuse(linked) == f"{linked} is a link."


def test_pipes_and_folders_are_no_files(folder: Path) -> None:
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    assert refuse(folder) == f"{folder / SHARD} is no file."
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    assert refuse(folder) == f"{folder / SHARD} is no file."


def shard_text(header: Any, body: bytes = b"\0" * 200) -> bytes:
    """A safetensors file with this header, as JSON or raw."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def one(**changes: Any) -> dict[str, Any]:
    """The header of a file that holds model.w, somehow changed."""
    return {"model.w": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        (2**63).to_bytes(8, "little") + b"\0" * 300,
        (2**64 - 1).to_bytes(8, "little") + b"\0" * 300,
        b"\0" * 300,
        shard_text(b"[" * 10_000, b""),
        shard_text(b'{"a":' * 10_000, b""),
        shard_text(one(data_offsets=[0, 2**63])),
        shard_text(one(data_offsets=[96, 0])),
        shard_text(one(data_offsets=[0, 95])),
        shard_text(one(shape=[2**62, 4])),
        shard_text(one(dtype="PICKLE")),
        shard_text(one(), b"\0" * 95),
        shard_text(one() | {"model.x": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}}, b"\0" * 96),
        shard_text(one() | {"model.x": {"dtype": "F32", "shape": [6, 4], "data_offsets": [48, 144]}}, b"\0" * 144),
        shard_text({"model.other": one()["model.w"]}, b"\0" * 96),
        shard_text(one(shape=[4, 6]), b"\0" * 96),
        shard_text(one(dtype="I32"), b"\0" * 96),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_hostile_shard_is_refused(folder: Path, data: bytes) -> None:
    (folder / SHARD).write_bytes(data)
    forge_manifest(folder, lambda manifest: keep_only(manifest, "model.w"))
    assert f"{folder / SHARD} " in refuse(folder)


def keep_only(manifest: dict[str, Any], name: str) -> None:
    manifest["tensors"] = {name: manifest["tensors"][name]}


def test_a_tensor_that_is_not_there_is_named(folder: Path) -> None:
    with open_checkpoint(folder, read_manifest(folder)) as reader:
        assert reader.find("model.nobody") is None
        for ask in (reader.read, reader.shape, reader.dtype):
            with pytest.raises(CheckpointError, match=r"has no tensor 'model\.nobody'"):
                ask("model.nobody")


# ── Boxes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def cuts_and_boxes(draw: Any) -> tuple[tuple[int, ...], list[list[int]], tuple[int, ...], tuple[int, ...]]:
    """A shape, where each dim of it is cut, and a box to read: its offset and shape."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    box = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    return shape, cuts, offset, box


def write_in_boxes(folder: Path, whole: torch.Tensor, cuts: list[list[int]]) -> Manifest:
    """A tensor cut into boxes that lie in two files in turn."""
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((), whole)]
    for dim, places in enumerate(cuts):
        boxes = [
            ((*offset, start), box.narrow(dim, start, end - start))
            for offset, box in boxes
            for start, end in itertools.pairwise(places)
        ]
    parts, files = [], {}
    for number in range(2):
        mine = [(str(index), *each) for index, each in enumerate(boxes) if index % 2 == number]
        name = f"file-{number}"
        path = folder / name
        path.unlink(missing_ok=True)
        files[name] = write_shard(path, [entry(key, box) for key, _, box in mine], [box for _, _, box in mine])
        parts += [PartRecord(name, key, offset, tuple(box.shape)) for key, offset, box in mine]
    tensor = TensorRecord("F32", tuple(whole.shape), tuple(parts))
    return Manifest("a", 1, 1, files, {"t": tensor}, {"u": "t"})


@settings(max_examples=60, deadline=None)
@given(cuts_and_boxes())
def test_any_box_is_that_of_the_whole(tmp_path_factory: pytest.TempPathFactory, drawn: Any) -> None:
    shape, cuts, offset, box = drawn
    whole = torch.randn(shape)
    folder = tmp_path_factory.mktemp("boxes")
    manifest = write_in_boxes(folder, whole, cuts)
    with open_checkpoint(folder, manifest) as reader:
        assert reader.find("u") == "t"
        assert torch.equal(reader.read("t"), whole)
        wanted = whole.numpy()[(..., *(slice(start, start + size) for start, size in zip(offset, box, strict=True)))]
        assert torch.equal(reader.read_box("t", offset, box), torch.from_numpy(wanted.copy()))
        target = torch.zeros(shape, dtype=torch.float64)
        reader.read_into(target, "t")
        assert torch.equal(target, whole.double())


def test_a_box_beyond_the_whole_is_refused(tmp_path: Path) -> None:
    manifest = write_in_boxes(tmp_path, torch.randn(4, 3), [[0, 2, 4], [0, 3]])
    with open_checkpoint(tmp_path, manifest) as reader, pytest.raises(ValueError, match="has no box of"):
        reader.read_box("t", (2, 0), (3, 3))
    hole = replace(manifest.tensors["t"], parts=manifest.tensors["t"].parts[:1])
    with (
        open_checkpoint(tmp_path, replace(manifest, tensors={"t": hole})) as reader,
        pytest.raises(ValueError, match="has no box of"),
    ):
        reader.read("t")


def test_complex_numbers_come_back(tmp_path: Path) -> None:
    whole = torch.randn(3, 2, dtype=torch.complex64)
    pairs = torch.view_as_real(whole)
    record = write_shard(tmp_path / "a", [entry("t", pairs)], [pairs])
    part = PartRecord("a", "t", (0, 0, 0), (3, 2, 2))
    manifest = Manifest("a", 1, 1, {"a": record}, {"t": TensorRecord("F32", (3, 2, 2), (part,), True)}, {})
    with open_checkpoint(tmp_path, manifest) as reader:
        assert torch.equal(reader.read("t"), whole)
        target = torch.zeros(3, 2, dtype=torch.complex64)
        reader.read_into(target, "t")
        assert torch.equal(target, whole)
