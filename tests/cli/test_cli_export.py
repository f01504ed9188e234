"""`trimaran export` as it is typed: what it prints, its exit codes, and help without torch."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from saved_checkpoints import save_by_hand
from trimaran.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    config = {"config.json": {"model_type": "x", "architectures": ["Net"]}}
    for step in (100, 200):
        save_by_hand(Path("run"), nn.Linear(5, 3), step=step, hugging_face={"files": config})
    return Path("run")


def test_it_says_what_it_wrote_and_what_to_do_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000200" / "state.json").unlink()
    assert main(["export", "run", "model.safetensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("passed   run/checkpoints/step-00000200/state.json is missing")
    assert lines[1] == "read     run/checkpoints/step-00000100"
    assert lines[2].startswith("wrote    model.safetensors  ")
    assert lines[3] == "holds    2 tensors, 72 B"
    assert lines[4].startswith("next     trimaran.Job(weights='model.safetensors'")
    assert load_file("model.safetensors").keys() == {"weight", "bias"}


def test_machines_are_told_in_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run@100", "out", "--shard-size", "20B", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["out"], told["step"], told["tensors"], told["bytes"]) == ("out", 100, 2, 72)
    assert told["checkpoint"] == "run/checkpoints/step-00000100"
    assert told["passed_over"] == []
    assert {each["name"] for each in told["files"]} == set(os.listdir("out"))
    for each in told["files"]:
        content = (Path("out") / each["name"]).read_bytes()
        assert (each["bytes"], each["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_for_hugging_face_it_says_what_reads_it_and_what_is_missing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "run", "out", "--hf"]) == 0
    told = capsys.readouterr().out
    assert "transformers.Net.from_pretrained('out')" in told
    assert "tokenizer.save_pretrained('out')" in told
    assert json.loads(Path("out/config.json").read_text()) == {"model_type": "x", "architectures": ["Net"]}


def test_the_trained_part(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = nn.Linear(5, 3)
    frozen.weight.requires_grad_(False)
    save_by_hand(run, frozen, step=300)
    assert main(["export", "run", "t.safetensors", "--trainable"]) == 0
    assert "partial=True" in capsys.readouterr().out
    assert torch.equal(load_file("t.safetensors")["bias"], frozen.bias)
    assert len(load_file("t.safetensors")) == 1


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["run"], 2, "Missing from trimaran export: OUT"),
        (["nowhere", "out"], 1, "nowhere holds no run."),
        (["run@7", "out"], 1, "It has those of steps 100, 200."),
        (["run", "run"], 2, "run exists."),
        (["run", "out", "--shard-sise", "1GB"], 2, "Did you mean --shard-size?"),
        (["run", "out", "--hf", "--trainable"], 2, "has no adapters"),
        (["run", "out.safetensors", "--hf"], 2, "Name a folder, such as out."),
    ],
)
def test_mistakes_are_named(
    words: list[str], code: int, expected: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *words]) == code
    told = capsys.readouterr()
    assert expected in told.err
    assert told.out == ""
    assert os.listdir() == ["run"]


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys; from trimaran.cli.main import main\n"
        "try: main(['export', '--help'])\n"
        "finally: print('torch is loaded' if 'torch' in sys.modules else 'torch is not loaded', file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "--shard-size" in ran.stdout
    assert "torch is not loaded" in ran.stderr
