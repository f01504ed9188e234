"""`trimaran verify`: the processes of both sides, lines, JSON, exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_job import run_command, write_job
from trimaran.cli.main import main

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.timeout(300)]

_MODEL = "        self.sleep = sleep\n"
# A job whose model is another one on rank 1: reading the rank is what no job should do.
_RANK_DEPENDENT = (_MODEL, f"{_MODEL}        self.up.weight.data *= 1 + int(os.environ.get('RANK', 0))\n")
_BATCH_NORM = ("nn.Linear(4, width), nn.Linear", "nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width)), nn.Linear")


def test_a_layout_that_equals_one_process(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, out, err = run_command("verify", "tiny.py", "--layout", "dp=2 micro_batch=3", "--width", "5", cwd=tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("tiny · 31 parameters · 5 steps of 8 samples")
    assert [line.split() for line in lines[1:3]] == [
        ["layout", "dp=2", "micro_batch=3", "precision=fp64", "2", "processes"],
        ["against", "dp=1", "micro_batch=8", "precision=fp64", "1", "process"],
    ]
    rows = [line for line in lines if line.startswith(("passed", "failed", "reported"))]
    assert [line.split()[0] for line in rows] == ["passed"] * 8
    told = {line.split()[0]: line for line in lines if line}
    assert "all-reduce" in told["traffic"]
    assert told["equal"]


def test_a_difference_is_named_and_exit_code_1(tmp_path: Path) -> None:
    write_job(tmp_path, _RANK_DEPENDENT)
    code, out, err = run_command("verify", "tiny.py", "--layout", "dp=2", "--steps", "2", "--json", cwd=tmp_path)
    assert (code, err) == (1, "")
    told = json.loads(out)
    assert told["equal"] is False
    assert (told["ranks"], told["steps"]) == (2, 2)
    assert told["difference"]["tensor"] == "up.weight"
    assert told["difference"]["what"] == "first value on rank 1"
    assert told["difference"]["excess"] is None
    assert [row["name"] for row in told["rows"] if row["status"] == "failed"][-1] == "ranks hold the same"
    assert set(told["collectives"]) == {"allreduce"}


def test_all_layouts_in_a_line_each(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, out, err = run_command("verify", "tiny.py", "--layouts", "all", "--procs", "2", "--steps", "1", cwd=tmp_path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("equal    dp=2 micro_batch=4 precision=fp64  (off by ")
    assert lines[1].startswith("equal    dp=2 micro_batch=2 precision=fp64  (off by ")
    refused = [line for line in lines if line.startswith("refused")]
    assert len(refused) == 2  # the model has no blocks
    assert all("recompute=" in line and "has no blocks." in line for line in refused)
    assert lines[-1].startswith(f"layouts  {len(lines) - 2 - len(refused)} equal, {len(refused)} refused")


def test_batch_statistics_are_compared_at_the_same_cut_or_refused(tmp_path: Path) -> None:
    write_job(tmp_path, _BATCH_NORM)
    code, out, _ = run_command("verify", "tiny.py", "--layout", "dp=2 micro_batch=2", cwd=tmp_path)
    assert code == 0
    assert "against  dp=1 micro_batch=2" in out
    assert "batch statistics (up.1) depend on the cut" in out
    words = ("--layout", "dp=2 micro_batch=6", "--global-batch", "16")
    code, out, err = run_command("verify", "tiny.py", *words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("LayoutError: up.1 normalises by batch statistics, over forwards of 2, 6 samples")
    assert "and of 4, 6 in" in err


@pytest.mark.slow
def test_another_reference(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("--layout", "precision=fp32", "--against", "dp=3 micro_batch=1", "--global-batch", "5", "--json")
    code, out, _ = run_command("verify", "tiny.py", *words, cwd=tmp_path)
    told = json.loads(out)
    assert (code, told["layout"], told["against"]) == (
        0,
        "dp=1 micro_batch=5 precision=fp32",
        "dp=3 micro_batch=1 precision=fp32",
    )
    assert {row["status"] for row in told["rows"]} == {"passed", "reported"}
    assert told["not_compared"]


def test_what_a_worker_meets_is_told_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("--fault", "raise@1", "--fault-rank", "1")
    code, out, err = run_command("verify", "tiny.py", "--layout", "dp=2", *words, cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("WorkerError: rank 1 (pid ")
    assert "RuntimeError: the forward broke" in err
    assert err.count("\n") == 2


def test_a_layout_that_cannot_be_is_refused_and_does_not_count(tmp_path: Path) -> None:
    write_job(tmp_path, _BATCH_NORM)
    words = ("--layouts", "all", "--procs", "2", "--steps", "1", "--global-batch", "16")
    code, out, err = run_command("verify", "tiny.py", *words, cwd=tmp_path)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("equal    dp=2 micro_batch=8 ")
    assert lines[1].startswith("refused  dp=2 micro_batch=3 precision=fp64  up.1 normalises by batch statistics")
    counts = [sum(line.startswith(word) for line in lines) for word in ("equal", "refused", "differs")]
    assert lines[-1].startswith(f"layouts  {counts[0]} equal, {counts[1]} refused")
    assert counts[2] == 0


def test_a_layout_that_fails_is_named(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("--layouts", "all", "--procs", "2", "--steps", "1", "--fault", "raise@1", "--fault-rank", "1")
    code, out, err = run_command("verify", "tiny.py", *words, cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("WorkerError: rank 1 (pid ")
    assert "in dp=2 micro_batch=4 precision=fp64: RuntimeError: the forward broke" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no job file"),
        (["--layout", "dp=2"], "before the job file"),
        (["tiny.py"], "No layout is given"),
        (["tiny.py", "--layout", "dp=2", "--layouts", "all", "--procs", "2"], "--layouts all and --layout 'dp=2'"),
        (["tiny.py", "--layouts", "all"], "--layouts all without --procs"),
        (["tiny.py", "--layouts", "some", "--procs", "2"], "some"),
        (["tiny.py", "--layout", "dp=2", "--steps", "0"], "--steps 0"),
        (["tiny.py", "--layout", "dp=2", "--steps", "7"], "own 6"),
        (["tiny.py", "--layout", "dp=2", "--procs", "0"], "--procs 0"),
        (["tiny.py", "--layout", "dp=2", "--procs", "3"], "there are 3"),
        (["tiny.py", "--layout", "dp=2", "--against", "precision=bf16"], "precision=fp64 against precision=bf16"),
        (["tiny.py", "--layout", "pd=2"], "'pd' is no axis"),
        (["tiny.py", "--layout", "dp=2", "--against", "dp"], "'dp' is not of the form"),
        (["tiny.py", "--layuot", "dp=2"], "--layuot is no flag"),
        (["tiny.py", "--layout", "dp=2", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *words]) == 2
    assert told in capsys.readouterr().err


def test_it_is_not_started_by_a_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert main(["verify", "tiny.py", "--layout", "dp=2"]) == 2
    assert "without a launcher" in capsys.readouterr().err
