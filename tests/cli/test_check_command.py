"""`trimaran check`: lines, JSON, exit codes, and what a run on several nodes says of a job never checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimaran.cli.job_file import call_job_function, load_job_function
from trimaran.cli.main import main
from trimaran.prove import CHECKS
from trimaran.run import Origin, assemble, start
from trimaran.run.checked import mark_checked, was_checked
from trimaran.run.describe import identify
from trimaran.world.groups import World

JOB = '''
import torch
from torch import nn
import trimaran as tm

class Points:
    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(128, 8, generator=generator)

    def __len__(self):
        return 128

    def __getitem__(self, index):
        return {"x": self.x[index], "label": (self.x[index, :3]).argmax()}

class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.layers[2].weight.data *= scale

    def forward(self, x):
        return self.layers(x)

def job(scale: float = 1.0) -> tm.Job:
    """Which of three numbers is the largest?"""
    return tm.Job(
        model=lambda: Net(scale), data=Points(), inputs=("x",), loss=tm.losses.cross_entropy(),
        optimizer=tm.optim.adamw(lr=1e-2), global_batch=16, steps=10,
    )
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "points.py"
    path.write_text(JOB)
    return path


def identity_of(file: Path, **arguments: Any) -> tuple[dict[str, Any], Origin]:
    """That of the job in the file, as `train` would have it."""
    job = call_job_function(load_job_function(file), arguments, file)
    origin = Origin(file, arguments)
    return identify(job, origin), origin


def test_a_good_job_passes_line_by_line_and_is_remembered(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not was_checked(*identity_of(file, scale=1.0))
    assert main(["check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(CHECKS)]] == ["passed"] * len(CHECKS)
    assert [line[9:].startswith(title) for line, title in zip(lines, CHECKS.values(), strict=False)] == [True] * 13
    assert lines[-2].startswith("checks   13 passed in ")
    assert lines[-1] == f"next     trimaran train {file}"
    assert was_checked(*identity_of(file, scale=1.0))
    assert not was_checked(*identity_of(file, scale=2.0))
    file.write_text(JOB + "\n# edited\n")
    assert not was_checked(*identity_of(file, scale=1.0))


def test_a_failure_has_rule_and_remedy_below_it_and_exit_code_1(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--scale", "60"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert lines[at].split()[1:3] == ["first", "loss"]
    assert "normalise the inputs" in lines[at + 1]
    assert "1 failed" in lines[-2]
    assert not was_checked(*identity_of(file, scale=60.0))


def test_json_is_one_object(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file), "--json", "--scale", "60", "--global-batch", "8"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"job", "passed", "seconds", "findings"}
    assert told["job"] == "points"
    assert told["passed"] is False
    assert [each["name"] for each in told["findings"]] == list(CHECKS)
    assert {tuple(each) for each in told["findings"]} == {("name", "status", "value", "rule", "remedy")}
    assert [each["name"] for each in told["findings"] if each["status"] == "failed"] == ["first_loss"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check"], "no job file"),
        (["check", "--json"], "before the job file"),
        (["check", "points.py", "--num-workers", "-1"], "num_workers=-1"),
        (["check", "points.py", "--steps", "3"], "--steps is no flag"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_a_check_is_not_started_by_a_launcher(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["check", str(file)]) == 2
    assert "one device, in one process" in capsys.readouterr().err


@pytest.mark.parametrize(("num_nodes", "checked", "says"), [(2, False, True), (2, True, False), (1, False, False)])
def test_a_run_on_several_nodes_says_that_a_job_was_never_checked(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    num_nodes: int,
    checked: bool,
    says: bool,
) -> None:
    identity, origin = identity_of(file, scale=1.0)
    if checked:
        mark_checked(identity, origin)
    opened = assemble.open_world

    def open_world(*args: Any, **options: Any) -> World:
        return replace(opened(*args, **options), num_nodes=num_nodes)

    monkeypatch.setattr(assemble, "open_world", open_world)
    job = call_job_function(load_job_function(file), {"scale": 1.0}, file)
    longer = job.with_overrides(steps=1, seed=3, global_batch=None)
    with start(longer, run=file.parent / "run", origin=origin) as run:
        for batch in run:
            run.step(batch)
    assert (f"has not passed trimaran check {file}" in capsys.readouterr().out) == says


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file, in which nothing can be made
    identity, origin = identity_of(file, scale=1.0)
    mark_checked(identity, origin)
    assert not was_checked(identity, origin)
