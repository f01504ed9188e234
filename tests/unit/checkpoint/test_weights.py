"""Weights in: names, shapes and kinds are checked before anything is changed; ties and shards are understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trimaran.checkpoint import digest_files, load_weights
from trimaran.errors import CheckpointError, JobError
from trimaran.job import Weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def written(path: Path, model: nn.Module, **names: str) -> Path:
    save_file({names.get(name, name): each for name, each in state(model).items()}, path)
    return path


@pytest.fixture
def pretrained() -> Tied:
    torch.manual_seed(7)
    model = Tied()
    model.norm.running_mean.fill_(3.0)
    model.norm.num_batches_tracked.fill_(9)
    return model


def test_every_parameter_and_buffer_is_loaded_and_ties_stay(tmp_path: Path, pretrained: Tied) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: each for name, each in state(pretrained).items() if name != "head.weight"}, path)
    model = Tied()
    loaded = load_weights(model, Weights(path))
    assert loaded.num_loaded == 6
    assert model.head.weight is model.embed.weight
    for name, each in state(pretrained).items():
        assert torch.equal(model.state_dict()[name], each), name


def test_an_index_of_several_files_is_followed(tmp_path: Path, pretrained: Tied) -> None:
    parts = list(state(pretrained).items())
    save_file(dict(parts[:3]), tmp_path / "one.safetensors")
    save_file(dict(parts[3:]), tmp_path / "two.safetensors")
    names = {name: "one.safetensors" if i < 3 else "two.safetensors" for i, (name, _) in enumerate(parts)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for path in (tmp_path, index):
        model = Tied()
        load_weights(model, Weights(path))
        assert all(torch.equal(model.state_dict()[name], each) for name, each in parts)


def test_a_name_in_two_files_is_read_from_the_one_the_index_says(tmp_path: Path, pretrained: Tied) -> None:
    tensors = state(pretrained)
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({"norm.bias": torch.full((3,), 7.0), "other": torch.ones(1)}, tmp_path / "two.safetensors")
    names = {**dict.fromkeys(tensors, "one.safetensors"), "other": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    model = Tied()
    load_weights(model, Weights(tmp_path, partial=("other",)))
    assert torch.equal(model.norm.bias, pretrained.norm.bias)


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "missing.safetensors"])
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=Path(name).name):
        load_weights(Tied(), Weights(tmp_path))


def test_names_are_mapped_and_left_out(tmp_path: Path, pretrained: Tied) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"encoder.{name}": each for name, each in state(pretrained).items()} | {"classifier.bias": torch.ones(2)}
    save_file(tensors, path)
    model = Tied()
    load_weights(model, Weights(path, rename={"classifier.*": None, "encoder.*": "*"}))
    assert torch.equal(model.embed.weight, pretrained.embed.weight)


def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path, pretrained: Tied) -> None:
    tensors = state(pretrained)
    tensors["norm.bias"] = torch.zeros(4)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    model = Tied()
    before = state(model)
    with pytest.raises(CheckpointError, match=r"norm\.bias: 4 in the file, 3 in the model"):
        load_weights(model, Weights(path, partial=True))
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())


def test_missing_and_unexpected_names_are_listed_unless_partial(tmp_path: Path, pretrained: Tied) -> None:
    tensors = state(pretrained)
    del tensors["norm.weight"]
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"1 tensors of .* are missing: norm\.weight"):
        load_weights(Tied(), Weights(path))
    save_file(tensors | {"extra": torch.ones(1), "norm.weight": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="unexpected: extra"):
        load_weights(Tied(), Weights(path))
    save_file(tensors | {"extra": torch.ones(1)}, path)
    loaded = load_weights(Tied(), Weights(path, partial=True))
    assert loaded.kept_first_values == ("norm.weight",)
    assert loaded.left_out == ("extra",)


def test_whole_numbers_are_not_taken_for_weights(tmp_path: Path, pretrained: Tied) -> None:
    path = tmp_path / "a.safetensors"
    save_file(state(pretrained) | {"norm.weight": torch.ones(3, dtype=torch.int64)}, path)
    with pytest.raises(CheckpointError, match="of another kind"):
        load_weights(Tied(), Weights(path))


def test_widths_are_converted(tmp_path: Path, pretrained: Tied) -> None:
    path = tmp_path / "a.safetensors"
    halves = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state(pretrained).items()}
    save_file(halves, path)
    model = Tied()
    load_weights(model, Weights(path))
    assert model.embed.weight.dtype is torch.float32
    assert torch.equal(model.embed.weight, pretrained.embed.weight.bfloat16().float())


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\xff" * 8 + b"{}"])
def test_what_is_no_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_weights(Tied(), Weights(path))


def test_missing_paths_and_ambiguous_folders_are_named(tmp_path: Path, pretrained: Tied) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_weights(Tied(), Weights(tmp_path / "no"))
    for name in ("a.safetensors", "b.safetensors"):
        written(tmp_path / name, pretrained)
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        load_weights(Tied(), Weights(tmp_path))


def test_rules_that_match_nothing_or_collide_are_refused(tmp_path: Path, pretrained: Tied) -> None:
    path = written(tmp_path / "a.safetensors", pretrained)
    with pytest.raises(CheckpointError, match="named by rename but not in the file: typo"):
        load_weights(Tied(), Weights(path, rename={"typo": "norm.bias"}))
    with pytest.raises(CheckpointError, match="both go to"):
        load_weights(Tied(), Weights(path, rename={"norm.weight": "norm.bias"}))
    with pytest.raises(JobError, match="at most one"):
        Weights(path, rename={"a.*": "b"})


def test_the_digest_tells_other_weights(tmp_path: Path, pretrained: Tied) -> None:
    first = digest_files(written(tmp_path / "a.safetensors", pretrained))
    assert first == digest_files(tmp_path / "a.safetensors")
    pretrained.norm.running_mean.fill_(4.0)
    assert first != digest_files(written(tmp_path / "a.safetensors", pretrained))


def test_patterns_say_what_may_be_missing(tmp_path: Path, pretrained: Tied) -> None:
    path = tmp_path / "a.safetensors"
    tensors = state(pretrained)
    del tensors["norm.weight"], tensors["norm.bias"]
    save_file(tensors | {"fc.bias": torch.ones(1)}, path)
    loaded = load_weights(Tied(), Weights(path, partial=("norm.*", "fc.*")))
    assert "first values kept by norm.weight, norm.bias; of the file left out: fc.bias" in str(loaded)
    with pytest.raises(CheckpointError, match=r"1 tensors of .* are missing: norm\.bias"):
        load_weights(Tied(), Weights(path, partial=("norm.weight", "fc.*")))
    with pytest.raises(JobError, match="is a string"):
        Weights(path, partial="fc.*")
