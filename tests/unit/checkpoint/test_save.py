"""Weights out: every tensor under its own name, ties once, the trained part alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from trimaran.checkpoint import load_weights, save_trained_weights, save_weights
from trimaran.errors import CheckpointError
from trimaran.job import Weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4)
        self.head.weight = self.embed.weight


def names(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_what_is_saved_loads_again(tmp_path: Path) -> None:
    model, other = Net(), Net()
    save_weights(model, tmp_path / "m.safetensors")
    load_weights(other, Weights(tmp_path / "m.safetensors"))
    for name, each in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], each), name
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_trained_part_alone_has_no_frozen_parameter_and_no_buffer(tmp_path: Path) -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    save_trained_weights(model, tmp_path / "t.safetensors")
    assert names(tmp_path / "t.safetensors") == {"norm.weight", "norm.bias", "head.bias"}


def test_a_save_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_weights(Net(), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("trimaran.checkpoint.save.os.fsync", full)
    with pytest.raises(CheckpointError, match="No space"):
        save_weights(Net(), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["m.safetensors"]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.randn(4, 4))
        self.register_buffer("part", self.get_buffer("whole")[:2])
        self.register_buffer("turned", self.get_buffer("whole").t())


def test_buffers_that_are_parts_of_others_are_saved_too(tmp_path: Path) -> None:
    model = Views()
    save_weights(model, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        for name, each in model.named_buffers():
            assert torch.equal(file.get_tensor(name), each), name


def test_numbers_that_safetensors_lack_are_named(tmp_path: Path) -> None:
    model = nn.Module()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="cannot hold phase, which is complex in double precision"):
        save_weights(model, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
