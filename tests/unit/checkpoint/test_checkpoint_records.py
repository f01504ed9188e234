"""The manifest and state.json: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import SHARD, flip_bit, forge_manifest, forge_state, make_checkpoint, some_tensors, write_sealed
from tiny_job import SOURCE
from trimaran.errors import CheckpointError
from trimaran.records import PartRecord, TensorRecord, read_manifest, read_state, to_text
from trimaran.records.checkpoints import find_gap


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint, of a run with a validation figure."""
    return make_checkpoint(tmp_path, 30, some_tensors(), validation={"loss": 0.5})


def test_what_was_written_comes_back(folder: Path) -> None:
    manifest, state = read_manifest(folder), read_state(folder)
    assert to_text(manifest) == (folder / "manifest.json").read_text()
    assert to_text(state) == (folder / "state.json").read_text()
    assert manifest.tensors["model.w"].parts == (PartRecord(SHARD, "model.w", (0, 0), (6, 4)),)
    scaled = replace(state, loss_scale={"value": 2.0**-14, "good_steps": 3}, validation=None)
    (folder / "state.json").write_text(to_text(scaled))
    assert read_state(folder) == scaled


def test_a_flipped_bit_anywhere_in_a_manifest_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for byte in [*range(0, 80, 4), *range(80, len(whole), len(whole) // 80), len(whole) - 1]:
        path.write_bytes(whole)
        flip_bit(path, byte=byte, bit=byte % 7)
        with pytest.raises(CheckpointError, match=r"manifest\.json (is damaged|has format)"):
            read_manifest(folder)


def test_a_truncated_manifest_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for length in [0, 1, 2, 80, len(whole) // 2, len(whole) - 2, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(folder)
    path.write_bytes(whole + b" ")
    with pytest.raises(CheckpointError, match="its text is not what was written"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "JSONDecodeError"),
        ("null", "None is no object"),
        ("[1]", "is no object"),
        ("{}", "no 'format'"),
        ('{"format": 1}', ""),
        ('{"format": 1, "format": 1}', "a name stands twice in one object"),
        ('{"format": 1, "step": NaN}', "NaN is no number"),
        ('{"format": 1, "step": -Infinity}', "-Infinity is no number"),
        ('{"format": 1, "step": 1e999}', "'1e999' is too large"),
        ('{"format": 1, "step": 1' + "0" * 5000 + "}", "digits"),
        ("[" * 200_000, "RecursionError"),
        ('{"a":' * 200_000, "RecursionError"),
        ("\x80\x04\x95", ""),
    ],
    ids=lambda value: value[:20],
)
def test_text_that_is_no_record_is_refused(folder: Path, name: str, text: str, said: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"{name} is damaged \(.*{said}") as caught:
        read_manifest(folder) if name == "manifest.json" else read_state(folder)
    assert len(caught.value.value) < 1000
    assert caught.value.remedy


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize("version", [2, "1", 0, None, 10**30])
def test_another_format_is_told_as_such(folder: Path, name: str, version: Any) -> None:
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({"surprise": [], **values, "format": version}))
    with pytest.raises(CheckpointError, match=rf"{name} has format .*; this version reads format 1\.") as caught:
        read_manifest(folder) if name == "manifest.json" else read_state(folder)
    assert caught.value.remedy == "Use the version that wrote it."


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_what_is_no_plain_file_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    def read() -> object:
        return read_manifest(folder) if name == "manifest.json" else read_state(folder)

    (folder / name).rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        read()
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="it is a link"):
        read()
    (folder / name).unlink()
    os.mkfifo(folder / name)  # to open it would wait for ever
    with pytest.raises(CheckpointError, match="it is no file"):
        read()
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(CheckpointError, match="it is no file"):
        read()


def set_at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a nested entry."""

    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


PART = ("tensors", "model.w", "parts", 0)
FORGERIES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (set_at("step", value=-1), "-1 is no count"),
    (set_at("step", value=True), "True is no count"),
    (set_at("step", value=3.0), "3.0 is no count"),
    (set_at("step", value=2**63), "is no count"),
    (set_at("epoch", value="1"), "'1' is no count"),
    (set_at("run_id", value=7), "7 is no string"),
    (set_at("run_id", value="\x1b[2Jgone"), "is no id"),
    (set_at("run_id", value="a" * 10**6), "is no id"),
    (set_at("files", value=[]), "is no object"),
    (set_at("files", value={}), "state.json is not among its files"),
    (set_at("files", "manifest.json", value={"num_bytes": 1, "sha256": "0" * 64}), "it names itself"),
    (set_at("files", SHARD, "sha256", value="0" * 63), "is no SHA-256"),
    (set_at("files", SHARD, "sha256", value=None), "is no string"),
    (set_at("files", SHARD, "num_bytes", value=-5), "is no count"),
    (set_at("files", SHARD, "num_bytes", value=100), "is too short for its parts"),
    *(
        (set_at("files", name, value={"num_bytes": 1, "sha256": "0" * 64}), "is no plain file name")
        for name in ["../state.json", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\\b", "a\nb", "a\0b", "x" * 300]
    ),
    (set_at(*PART, "file", value="../../secret"), "is no plain file name"),
    (set_at(*PART, "file", value="other.safetensors"), "which is not among its files"),
    (set_at(*PART, "offset", value="00"), "is no list"),
    (set_at(*PART, "offset", value={}), "is no list"),
    (set_at(*PART, "offset", value=[0]), "is none of (6, 4)"),
    (set_at(*PART, "offset", value=[0, -4]), "is no count"),
    (set_at(*PART, "offset", value=[1, 0]), "reaches beyond"),
    (set_at(*PART, "shape", value=[6, 3]), "hold 18 of 24 numbers"),
    (set_at(*PART, "shape", value=[6, True]), "is no count"),
    (set_at(*PART, "key", value=None), "is no string"),
    (set_at("tensors", "model.w", "parts", value={}), "is no list"),
    (set_at("tensors", "model.w", "parts", value=[]), "hold 0 of 24 numbers"),
    (set_at("tensors", "model.w", "parts", value=["x"]), "TypeError"),
    (set_at("tensors", "model.w", "shape", value=[2**62] * 64), "is none of (46"),
    (
        set_at("tensors", "model.w", "shape", value=[2**62, 2**62]),
        f"hold 24 of {2**124} numbers",
    ),
    (set_at("tensors", "model.w", "shape", value=[1] * 65), "65 dims are more than 64"),
    (set_at("tensors", "model.w", "shape", value=[10**4000]), "is no count"),
    (set_at("tensors", "model.w", "dtype", value="PICKLE"), "is no known kind of number"),
    (set_at("tensors", "model.w", "dtype", value=["F32"]), "is no string"),
    (set_at("tensors", "model.w", "is_complex", value="no"), "holds no complex numbers"),
    (set_at("tensors", "model.w", "is_complex", value=True), "holds no complex numbers"),
    (set_at("tensors", "model.w", value=[]), "TypeError"),
    (set_at("tensors", value=[]), "is no object"),
    (lambda values: values.pop("tensors"), "no 'tensors'"),
    (set_at("aliases", value={"model.tied": "model.nobody"}), "stands for"),
    (set_at("aliases", value={"model.w": "model.half"}), "stands for"),
    (set_at("aliases", value={"model.tied": ["model.w"]}), "is no string"),
]


@pytest.mark.parametrize(("change", "said"), FORGERIES, ids=[said[:30] for _, said in FORGERIES])
def test_a_forged_manifest_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    forge_manifest(folder, change)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert said in caught.value.value
    assert "manifest.json is damaged" in caught.value.value
    assert len(caught.value.value) < 1000  # nothing forged can fill the screen
    assert "\x1b" not in caught.value.value


def test_a_manifest_that_says_a_thing_twice_is_refused(folder: Path) -> None:
    text = to_text(read_manifest(folder))
    text = "{" + text[text.index('"run_id"') :]
    write_sealed(folder, text)
    read_manifest(folder)
    write_sealed(folder, text.replace('"model.w": {', '"model.count": {', 1))
    with pytest.raises(CheckpointError, match="a name stands twice in one object"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_at("step", value=-1), "is no count"),
        (set_at("position", value=1.5), "is no count"),
        (set_at("num_updates", value=True), "is no count"),
        (set_at("loss_scale", value={}), "no 'value'"),
        (set_at("loss_scale", value=[1]), "TypeError"),
        (set_at("loss_scale", value={"value": "1", "good_steps": 0}), "is no number"),
        (set_at("loss_scale", value={"value": 1, "good_steps": 0.5}), "is no count"),
        (set_at("validation", value={"loss": "small"}), "is no number"),
        (set_at("validation", value={"loss": True}), "is no number"),
        (set_at("validation", value=[]), "is no object"),
        (set_at("optimizer", value=[]), "is no object"),
        (set_at("trained", value="abc"), "is no list"),
        (set_at("trained", value=[1]), "is no string"),
        (set_at("layout", value=None), "is no string"),
        (set_at("hugging_face", value="x"), "is no object"),
        (lambda values: values.pop("trained"), "no 'trained'"),
    ],
)
def test_a_forged_state_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    forge_state(folder, change)
    with pytest.raises(CheckpointError) as caught:
        read_state(folder)
    assert said in caught.value.value
    assert "state.json is damaged" in caught.value.value


def test_a_record_that_no_reader_would_take_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, state = read_manifest(folder), read_state(folder)
    with pytest.raises(ValueError, match="Out of range"):
        to_text(replace(state, optimizer={"lr": float("nan")}))
    monkeypatch.setattr("trimaran.records.checkpoints._MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"a manifest\.json would have \d+ bytes"):
        to_text(manifest)
    with pytest.raises(CheckpointError, match=r"a state\.json would have \d+ bytes"):
        to_text(replace(state, layout="x" * 1000))


def test_a_file_without_end_is_not_read(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 2**40)  # takes no disk
    with pytest.raises(CheckpointError, match="it is 1099511627776 bytes long"):
        read_manifest(folder)


READ_LIMITED = """
import resource, sys
from pathlib import Path
from trimaran.errors import CheckpointError
from trimaran.records import read_manifest
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_manifest(Path(sys.argv[1]))
except CheckpointError as refusal:
    print(refusal.value[-200:])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.timeout(30)  # pair by pair it would be minutes
@pytest.mark.parametrize(
    ("parts", "shape", "said"),
    [
        # Each part alone is fine; pairs of them are 10^8.
        ([[[0, at], [1, 1]] for at in range(20_000)], [1, 30_000], "hold 20000 of 30000 numbers"),
        ([[[0, at // 2], [1, 1]] for at in range(20_000)], [1, 20_000], "overlap, and leave gaps"),
        ([[[0] * 20, [1] * 20]] * 1_000, [10, 10, 10] + [1] * 17, "overlap, and leave gaps"),
        ([[[0] * 20, [1] * 19 + [2]]] * 1_000, [2] * 20, "numbers"),
        ([[[0] * 10, [1] * 10]] * 2**10, [2] * 10, "it is cut along 10 dims, of which 4 can be"),
    ],
    ids=["too few", "twice", "many dims", "exponential", "cut everywhere"],
)
def test_many_parts_are_checked_in_moderate_time(folder: Path, parts: Any, shape: Any, said: str) -> None:
    listed = [{"file": SHARD, "key": "k", "offset": offset, "shape": part} for offset, part in parts]
    forge_manifest(folder, set_at("files", SHARD, "num_bytes", value=2**40))
    values = json.loads((folder / "manifest.json").read_text())
    del values["sha256"]
    values["tensors"]["model.w"] = {"dtype": "U8", "shape": shape, "is_complex": False, "parts": listed}
    write_sealed(folder, json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    assert said in caught.value.value


@pytest.mark.parametrize(
    ("sealed", "count", "most", "said"),
    [(False, 4_000_000, 3, "its text is not what was written"), (True, 500_000, 40, "is no object")],
)
def test_the_memory_for_a_hostile_manifest_is_bounded(
    folder: Path, sealed: bool, count: int, most: int, said: str
) -> None:
    """A text that nobody sealed is not even parsed; a sealed one takes what its length allows."""
    text = '{"run_id": "a", "epoch": 1, "step": 1, "files": [' + "[],{}," * count + '0], "format": 1}'
    write_sealed(folder, text)
    if not sealed:
        flip_bit(folder / "manifest.json", byte=20)
    ran = subprocess.run(
        [sys.executable, "-c", READ_LIMITED, str(folder)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )
    told, kib = ran.stdout.splitlines()[-2:]
    assert said in told
    assert int(kib) * 1024 < most * (folder / "manifest.json").stat().st_size


# ── find_gap against numpy ──────────────────────────────────────────────────────────────────────────────────────────


def record(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> TensorRecord:
    return TensorRecord("F32", shape, tuple(PartRecord("f", str(i), *box) for i, box in enumerate(boxes)))


def fills_exactly(tensor: TensorRecord) -> bool:
    """The same question, by counting in an array how often each number is covered."""
    covered = np.zeros(tensor.shape, dtype=int)
    for part in tensor.parts:
        inside = all(o + s <= w for o, s, w in zip(part.offset, part.shape, tensor.shape, strict=True))
        if not inside:
            return False
        covered[tuple(slice(o, o + s) for o, s in zip(part.offset, part.shape, strict=True))] += 1
    return bool((covered == 1).all())


@st.composite
def tilings(draw: Any) -> TensorRecord:
    """A whole that is split in two again and again, some boxes empty; then perhaps one box is changed."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, size[dim]))
        low = tuple(cut if each == dim else length for each, length in enumerate(size))
        high = tuple(length - cut if each == dim else length for each, length in enumerate(size))
        start = tuple(at + cut if each == dim else at for each, at in enumerate(offset))
        boxes += [(offset, low), (start, high)]
    boxes = draw(st.permutations(boxes))
    change = draw(st.sampled_from(["none", "drop", "repeat", "move", "swap"]))
    index = draw(st.integers(0, len(boxes) - 1))
    if change == "drop":
        del boxes[index]
    elif change == "repeat":
        boxes.append(boxes[index])
    elif change == "move" and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        offset, size = boxes[index]
        boxes[index] = (tuple(at + (each == dim) for each, at in enumerate(offset)), size)
    elif change == "swap":  # the right total, one box twice
        others = [each for each in boxes if np.prod(each[1]) == np.prod(boxes[index][1])]
        boxes[index] = others[0]
    return record(shape, boxes)


@settings(max_examples=150, deadline=None)
@given(tilings())
def test_gaps_and_overlaps_are_found_as_by_counting(tensor: TensorRecord) -> None:
    assert (find_gap(tensor) is None) == fills_exactly(tensor)


def test_boxes_need_not_lie_in_rows() -> None:
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert find_gap(record((3, 3), wheel)) is None
    assert find_gap(record((3, 3), [*wheel[:4], ((0, 0), (1, 1))])) is not None
    assert find_gap(record((), [((), ())])) is None
    assert find_gap(record((), [((), ())] * 2)) is not None
    assert find_gap(record((0, 3), [])) is None


def test_a_grid_of_many_parts_is_checked() -> None:
    grid = [((4 * row, 2 * column), (4, 2)) for row, column in product(range(64), range(64))]
    assert find_gap(record((256, 128), grid)) is None
    assert find_gap(record((256, 128), [*grid[:-1], grid[0]])) is not None
