"""Weights out of a checkpoint: from odd parts, under the model's names, whole or not at all, one tensor in memory."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import trimaran.checkpoint.export as export_module
from saved_checkpoints import save_by_hand
from trimaran.checkpoint import load_weights
from trimaran.checkpoint.export import export_weights
from trimaran.checkpoint.reading import CheckpointReader
from trimaran.checkpoint.shard_file import Entry
from trimaran.errors import CheckpointError, RunError, UsageError
from trimaran.job import Weights
from trimaran.records import read_manifest, to_text


class Net(nn.Module):
    """Tied ends, a norm's counter without dims, a buffer that no state_dict has, several kinds of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.conv = nn.Conv1d(3, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("passing", torch.rand(4), persistent=False)
        self.register_buffer("brief", torch.rand(3, 2).bfloat16())
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("nothing", torch.empty(0, 4))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def run(tmp_path: Path, net: Net) -> Path:
    save_by_hand(tmp_path / "run", net)
    return tmp_path / "run"


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(
        each.dtype == expected[name].dtype and torch.equal(each, expected[name]) for name, each in tensors.items()
    )


def expected_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.state_dict().items() if name != "head.weight"}


def test_parts_become_one_file_with_the_names_of_the_model(run: Path, net: Net, tmp_path: Path) -> None:
    written = export_weights(run, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert same(tensors, expected_of(net))
    assert "passing" not in tensors
    assert written.step == 100
    assert written.num_tensors == len(tensors)
    assert written.num_bytes == sum(each.nbytes for each in tensors.values())
    assert written.files["model.safetensors"].num_bytes == (tmp_path / "model.safetensors").stat().st_size
    other = Net()
    load_weights(other, Weights(tmp_path / "model.safetensors"))
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_a_folder_holds_one_file_where_the_weights_are_small(run: Path, net: Net, tmp_path: Path) -> None:
    export_weights(run, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected_of(net))


def test_large_weights_are_sharded_with_an_index(run: Path, net: Net, tmp_path: Path) -> None:
    limit = 150  # the embedding has 140 bytes, the convolution 180
    written = export_weights(run, tmp_path / "out", shard_size=f"{limit}B")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = [name for name in written.files if name.endswith(".safetensors")]
    assert names == [f"model-{at + 1:05d}-of-{len(names):05d}.safetensors" for at in range(len(names))]
    assert len(names) > 2
    assert set(os.listdir(tmp_path / "out")) == set(written.files)
    found: dict[str, Tensor] = {}
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == tensors.keys()
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit
        found |= tensors
    assert same(found, expected_of(net))
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    other = Net()
    load_weights(other, Weights(tmp_path / "out"))
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_the_trained_parameters_alone(tmp_path: Path, net: Net) -> None:
    net.embed.weight.requires_grad_(False)
    save_by_hand(tmp_path / "run", net)
    export_weights(tmp_path / "run", tmp_path / "t.safetensors", trainable=True)
    trained = {name: each.detach() for name, each in net.named_parameters() if each.requires_grad}
    assert "head.bias" in trained
    assert same(load_file(tmp_path / "t.safetensors"), trained)


def test_a_trained_parameter_that_is_tied_is_found(net: Net, tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run", net, trained=["head.weight"])
    export_weights(tmp_path / "run", tmp_path / "t.safetensors", trainable=True)
    assert same(load_file(tmp_path / "t.safetensors"), {"head.weight": net.embed.weight.detach()})


# Which checkpoint


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_newest_valid_one_is_taken_and_the_others_are_named(run: Path, net: Net, tmp_path: Path) -> None:
    before = {name: each.clone() for name, each in expected_of(net).items()}
    with torch.no_grad():
        net.embed.weight.add_(1)
    flip(save_by_hand(run, net, step=300) / "shard-1.safetensors")
    (save_by_hand(run, net, step=200) / "shard-2.safetensors").unlink()
    (save_by_hand(run, net, step=400) / "manifest.json").unlink()
    save_by_hand(run, net, step=99)
    (run / "checkpoints" / "step-00000500.tmp-1").mkdir()
    written = export_weights(run, tmp_path / "model.safetensors")
    assert written.step == 100
    assert same(load_file(tmp_path / "model.safetensors"), before)
    assert ["00000400" in written.passed_over[0], "00000300" in written.passed_over[1]] == [True, True]
    assert "SHA-256" in written.passed_over[1]
    assert "is missing" in written.passed_over[2]
    assert len(written.passed_over) == 3


def test_a_step_names_one_checkpoint_and_no_other(run: Path, net: Net, tmp_path: Path) -> None:
    with torch.no_grad():
        net.embed.weight.add_(1)
    flip(save_by_hand(run, net, step=200) / "shard-1.safetensors")
    assert export_weights(f"{run}@100", tmp_path / "a.safetensors").step == 100
    with pytest.raises(RunError, match=r"no checkpoint of .*run@200 can be used: .* has SHA-256"):
        export_weights(f"{run}@200", tmp_path / "b.safetensors")
    with pytest.raises(RunError, match=r"no checkpoint of step 300.\nIt has those of steps 100, 200"):
        export_weights(f"{run}@300", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_directory_may_have_an_at_sign_in_its_name(run: Path, tmp_path: Path) -> None:
    run.rename(tmp_path / "a@5")
    assert export_weights(tmp_path / "a@5", tmp_path / "a.safetensors").step == 100
    assert export_weights(f"{tmp_path / 'a@5'}@100", tmp_path / "b.safetensors").step == 100
    with pytest.raises(UsageError, match="names step 'newest'"):
        export_weights(f"{tmp_path / 'a@5'}@newest", tmp_path / "c.safetensors")


def test_a_checkpoint_under_the_name_of_another_step_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-00000100", run / "checkpoints" / "step-00000900")
    assert "of step 100" in export_weights(run, tmp_path / "a.safetensors").passed_over[0]


def test_what_an_orphan_saved_after_it_was_replaced_is_not_taken(run: Path, net: Net, tmp_path: Path) -> None:
    save_by_hand(run, net, step=200)
    (run / "owner.json").write_text(json.dumps({"epoch": 2, "resumed": {"2": 150}}))
    written = export_weights(run, tmp_path / "a.safetensors")
    assert written.step == 100
    assert "owner 2 had gone on from step 150" in written.passed_over[0]


def test_runs_without_a_checkpoint_that_can_be_read(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    (tmp_path / "file").write_text("")
    for none in ("nowhere", "nowhere@100", "file"):
        with pytest.raises(RunError, match="holds no run"):
            export_weights(tmp_path / none, out)
    with pytest.raises(RunError, match="holds no run"):
        export_weights(tmp_path, out)
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "run.json", tmp_path / "new")
    with pytest.raises(RunError, match="has no checkpoints"):
        export_weights(tmp_path / "new", out)
    (run / "checkpoints" / "step-00000100" / "state.json").unlink()
    with pytest.raises(RunError, match=r"no checkpoint of .* can be used: .*/state.json is missing"):
        export_weights(run, out)
    assert not out.exists()


def test_a_manifest_that_leaves_its_directory_is_refused(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    shutil.copy(run / "checkpoints" / "step-00000100" / "shard-0.safetensors", secret)
    folder = run / "checkpoints" / "step-00000100"
    manifest = read_manifest(folder)
    outside = "../../../secret.safetensors"
    tensors = {
        name: replace(each, parts=tuple(replace(part, file=outside) for part in each.parts))
        for name, each in manifest.tensors.items()
    }
    files = {**manifest.files, outside: manifest.files["shard-0.safetensors"]}
    (folder / "manifest.json").write_text(to_text(replace(manifest, files=files, tensors=tensors)))
    with pytest.raises(RunError, match="no plain file name"):
        export_weights(f"{run}@100", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


# Where to


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("there.safetensors", "there", "dangling"):
        with pytest.raises(UsageError, match="exists"):
            export_weights(run, tmp_path / name)
    assert (tmp_path / "there.safetensors").read_text() == "mine"
    assert os.listdir(tmp_path / "there") == ["mine"]
    with pytest.raises(UsageError, match="names no file"):
        export_weights(run, "/")


def test_what_appears_meanwhile_is_not_overwritten_either(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.safetensors"
    real = export_module.write_shard

    def write_and_interfere(*words: Any) -> Any:
        out.write_text("mine")
        return real(*words)

    monkeypatch.setattr(export_module, "write_shard", write_and_interfere)
    with pytest.raises(UsageError, match="exists"):
        export_weights(run, out)
    assert out.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "run"]


def test_an_empty_folder_is_filled_and_missing_parents_are_made(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export_weights(run, tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == ["model.safetensors"]
    export_weights(run, tmp_path / "deep" / "er" / "a.safetensors")
    assert os.listdir(tmp_path / "deep" / "er") == ["a.safetensors"]


@pytest.mark.parametrize("name", ["a.safetensors", "folder"])
def test_what_cannot_be_written_whole_is_not_there(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = export_module.write_shard, []

    def write_until_full(path: Path, *words: Any) -> Any:
        calls.append(path)
        if len(calls) == (1 if name.endswith(".safetensors") else 2):
            path.write_text("half")
            raise OSError(28, "No space left on device")
        return real(path, *words)

    monkeypatch.setattr(export_module, "write_shard", write_until_full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        export_weights(run, tmp_path / name, shard_size="1B")
    assert calls
    assert os.listdir(tmp_path) == ["run"]


def test_files_have_the_modes_of_the_user_and_not_of_a_checkpoint(run: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_weights(run, tmp_path / "out", shard_size="150B")
        export_weights(run, tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in [*(tmp_path / "out").iterdir(), tmp_path / "a.safetensors"]} == {
        0o640
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"shard_size": "0MB"}, "holds nothing"),
        ({"shard_size": "5XB"}, "unknown unit 'XB'"),
        ({"hf": True}, "none of transformers or PEFT"),
        ({"hf": True, "trainable": True}, "none of transformers or PEFT"),
    ],
)
def test_what_cannot_be_meant(words: dict[str, Any], expected: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=expected):
        export_weights(run, tmp_path / "out", **words)
    assert os.listdir(tmp_path) == ["run"]


def test_the_checkpoints_of_a_run_are_no_place_for_it(run: Path) -> None:
    for name in ("step-00000009", "model.safetensors"):
        with pytest.raises(UsageError, match=f"{name} lies among the checkpoints of a run"):
            export_weights(run, run / "checkpoints" / name)


def test_hugging_face_needs_a_folder(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Name a folder, such as .*/out\.$"):
        export_weights(run, tmp_path / "out.safetensors", hf=True)


def test_trainable_needs_something_trained(net: Net, tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run", net, trained=[])
    with pytest.raises(UsageError, match="no trained parameter"):
        export_weights(tmp_path / "run", tmp_path / "out", trainable=True)


# What a checkpoint says of Hugging Face is not believed


def test_only_known_files_are_written(net: Net, tmp_path: Path) -> None:
    files = {"config.json": {"model_type": "x"}, "../escaped.json": {}, "modeling.py": {}}
    save_by_hand(tmp_path / "run", net, hugging_face={"files": files})
    export_weights(tmp_path / "run", tmp_path / "out", hf=True)
    assert set(os.listdir(tmp_path / "out")) == {"model.safetensors", "config.json"}
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize(
    "said",
    [
        {"files": ["config.json"]},
        {"files": {"config.json": "text"}},
        {"files": {"adapter_config.json": {}}, "adapter": {"a": ["norm.weight"]}},
        {"files": {"adapter_config.json": {}}, "adapter": {"a": "no.such"}},
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, Any], net: Net, tmp_path: Path) -> None:
    save_by_hand(tmp_path / "run", net, hugging_face=said)
    with pytest.raises(CheckpointError):
        export_weights(tmp_path / "run", tmp_path / "out", hf=True, trainable="adapter" in said)
    assert os.listdir(tmp_path) == ["run"]


# What is no tensor of the model, or no real one


def test_tensors_of_extra_state_are_left_out_and_said_so(net: Net, tmp_path: Path) -> None:
    expected = expected_of(net)
    net.norm.register_buffer("_extra_state", torch.rand(2))
    net.norm._extra_state_more = nn.Parameter(torch.rand(3))
    save_by_hand(tmp_path / "run", net, extra={"norm._extra_state": {"tensor": "norm._extra_state"}})
    written = export_weights(tmp_path / "run", tmp_path / "a.safetensors")
    assert written.left_out == ("norm._extra_state",)
    assert load_file(tmp_path / "a.safetensors").keys() == {*expected, "norm._extra_state_more"}


def test_complex_numbers_are_refused_by_name(tmp_path: Path) -> None:
    net = nn.Linear(2, 2, dtype=torch.complex64)
    save_by_hand(tmp_path / "run", net)
    with pytest.raises(UsageError, match=r"^weight of .* holds complex numbers"):
        export_weights(tmp_path / "run", tmp_path / "a.safetensors")
    assert os.listdir(tmp_path) == ["run"]


# Memory


def test_one_tensor_is_read_at_a_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    read: list[str] = []
    real = CheckpointReader.read

    def read_and_count(reader: CheckpointReader, name: str) -> Tensor:
        assert not alive, f"{name} is read while another is held"
        tensor = real(reader, name)
        read.append(name)
        alive.add(tensor)
        return tensor

    def drop_each(path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor]) -> Any:
        given = iter(tensors)
        for _ in entries:
            next(given)
        path.touch()
        return export_module.FileRecord(0, "")

    monkeypatch.setattr(CheckpointReader, "read", read_and_count)
    monkeypatch.setattr(export_module, "write_shard", drop_each)
    export_weights(run, tmp_path / "out", shard_size="150B")
    assert len(read) > 5
