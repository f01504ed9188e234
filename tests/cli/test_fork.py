"""`--fork` begins from another run's whole state, changed as the command says; `--from` from its weights alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trimaran as tm
from pool import Pool
from resuming import NEVER, Case, Ids, Rows, assert_same_run, build_job, read_newest, train
from tiny_job import events_of, lines_of, losses_of, write_job
from trimaran.cli.main import main
from trimaran.data import Order
from trimaran.errors import CheckpointError, RunError
from trimaran.job import Job

# ── The command ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny job and its run "a", whose every second step is kept."""
    folder = tmp_path_factory.mktemp("source")
    write_job(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        assert main(["train", "tiny.py", "--run", "a", "--save-every", "2steps", "--keep-last", "all"]) == 0
    return folder


@pytest.fixture
def command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Trains the tiny job in a folder that has the run "a" already."""
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["train", "tiny.py", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_fork_without_a_change_repeats_the_run(command: Any) -> None:
    code, out, err = command("--run", "b", "--fork", "a@4")
    assert (code, err) == (0, "")
    assert "new, --fork a@4" in out
    assert "begins   from a/checkpoints/step-00000004" in out
    assert "changed" not in out
    assert lines_of(Path("b/metrics.jsonl")) == lines_of(Path("a/metrics.jsonl"))[4:]
    assert Path("b/model.safetensors").read_bytes() == Path("a/model.safetensors").read_bytes()
    assert events_of(Path("b")) == [("forked", 4), ("saved", 6), ("finished", 6)]


def test_a_fork_lists_and_records_what_was_changed(command: Any) -> None:
    code, out, err = command("--run", "b", "--fork", "a@4", "--lr", "0.02", "--length", "8")
    assert (code, err) == (0, "")
    assert "changed  arguments.lr: 0.01 → 0.02" in out
    assert "changed  steps: 6 → 8" in out
    origin = json.loads(Path("b/run.json").read_text())["origin"]
    assert origin["run_id"] == json.loads(Path("a/run.json").read_text())["id"]
    assert (origin["step"], origin["changed"]["arguments.lr"]) == (4, [0.01, 0.02])
    theirs, ours = lines_of(Path("a/metrics.jsonl"))[4:], lines_of(Path("b/metrics.jsonl"))
    assert [each["step"] for each in ours] == [5, 6, 7, 8]
    assert [each["lr"] for each in ours] == [0.02] * 4
    # The state is that of step 4, the update another.
    assert ours[0]["loss"] == theirs[0]["loss"]
    assert ours[1]["loss"] != theirs[1]["loss"]


def test_a_fork_of_a_whole_run_goes_on_from_its_newest(command: Any) -> None:
    command("--run", "b", "--fork", "a", "--length", "9")
    assert events_of(Path("b"))[0] == ("forked", 6)
    assert [each["step"] for each in lines_of(Path("b/metrics.jsonl"))] == [7, 8, 9]
    before = Path("b/metrics.jsonl").read_bytes()
    assert command("--run", "b", "--fork", "a", "--length", "9")[0] == 0
    assert command("--run", "b", "--length", "9")[0] == 0  # a run continues without being told from where
    assert [event for event, _ in events_of(Path("b"))][-2:] == ["resumed", "finished"]
    assert Path("b/metrics.jsonl").read_bytes() == before


def test_from_takes_the_weights_alone(command: Any) -> None:
    code, out, err = command("--run", "b", "--from", "a@6", "--seed", "5", "--save-every", "2steps")
    assert (code, err) == (0, "")
    assert "new, --from a@6" in out
    assert events_of(Path("b"))[0] == ("started", 0)
    assert [each["step"] for each in lines_of(Path("b/metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]
    newest = read_newest(Path("b"))
    assert float(newest.tensors["optimizer.up.weight.step"]) == 6
    # A run that takes the same weights another way is the same run.
    write_job(Path(), ("global_batch=8,", 'global_batch=8, weights="a/model.safetensors",'))
    assert command("--run", "c", "--seed", "5")[0] == 0
    assert losses_of(Path("c")) == losses_of(Path("b"))
    write_job(Path())
    before = Path("b/metrics.jsonl").read_bytes()
    assert command("--run", "b", "--from", "a@6", "--seed", "5")[0] == 0
    assert events_of(Path("b"))[-2:] == [("resumed", 6), ("finished", 6)]
    assert Path("b/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--fork", "a@4", "--width", "9"),
            "--fork a@4: parameter up.weight is of shape 8×4; in this job it is of shape 9×4",
        ),
        (
            ("--from", "a", "--width", "9"),
            "--from a: parameter up.weight is of shape 8×4; in this job it is of shape 9×4",
        ),
        (("--fork", "a@5"), "--fork a@5: a has no checkpoint of step 5."),
        (("--fork", "nowhere"), "--fork nowhere: nowhere holds no run."),
        (("--fork", "b"), "--fork b names the run's own directory."),
        (("--fork", "a", "--from", "a"), "--fork a and --from a."),
    ],
)
def test_what_cannot_be_begun_from_is_refused(command: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = command("--run", "b", *words)
    assert code != 0
    assert out == ""
    assert said in err
    assert not Path("b/run.json").exists()
    assert command("--run", "b", "--fork", "a@4")[0] == 0  # and nothing of it stands in the way


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("adamw(lr=lr)", "sgd(lr=lr, momentum=0.9)"),
            "AdamW'; this job has torch.optim.sgd.SGD.",
        ),
        (("nn.Linear(width, 1)", "nn.Linear(width, 1).requires_grad_(False)"), "down.weight was trained when the"),
        (
            ("nn.Linear(width, 1)", "nn.Linear(width, 1, bias=False)"),
            "parameter down.bias is of shape 1; in this job it ",
        ),
        (
            ("self.what, _", "self.more = nn.Linear(3, 3); self.what, _"),
            "parameter more.weight is not there; in this job",
        ),
        (
            ("self.what, _", "self.register_buffer('more', torch.ones(3)); self.what, _"),
            "1 tensors of the model are not in the checkpoint: more.",
        ),
    ],
)
def test_another_model_or_optimizer_is_refused(command: Any, change: tuple[str, str], said: str) -> None:
    write_job(Path(), change)
    code, out, err = command("--run", "b", "--fork", "a@4")
    assert (code, out) == (1, "")
    assert said in err
    assert "Traceback" not in err
    assert not Path("b/run.json").exists()


def test_another_source_than_before_is_refused(command: Any) -> None:
    command("--run", "b", "--fork", "a@4", "--length", "7")
    for words in (("--fork", "a@2"), ("--fork", "a"), ("--from", "a@4")):
        code, _, err = command("--run", "b", *words, "--length", "7")
        assert code == 1
        assert f"b was started with --fork a@4; this command has {' '.join(words)}." in err
    code, _, err = command("--run", "a", "--fork", "b")
    assert code == 1
    assert "a was started anew; this command has --fork b." in err
    code, _, err = command("--run", "b", "--fork", "a@4", "--lr", "0.5", "--length", "7")
    assert code == 1
    assert "b was started with lr=0.01; this command has lr=0.5." in err


def test_the_same_source_may_be_spelled_otherwise(command: Any) -> None:
    command("--run", "b", "--fork", "a@4", "--length", "7")
    for source in ("./a@4", "b/../a@4", f"{Path('a').resolve()}@4"):
        assert command("--run", "b", "--fork", source, "--length", "7")[0] == 0


def test_a_fork_with_no_step_left_is_refused(command: Any) -> None:
    for length in ("6", "3"):
        code, out, err = command("--run", "b", "--fork", "a", "--length", length)
        assert (code, out) == (1, "")
        assert f"--fork a begins after step 6, and the job has {length}." in err
        assert not Path("b/run.json").exists()


def test_a_run_that_is_over_says_so_and_names_what_it_clears(command: Any) -> None:
    leftover = Path("a/checkpoints/step-00000003.tmp-1")
    leftover.mkdir()
    code, out, err = command("--run", "a")
    assert (code, err) == (0, "")
    assert "finished before, at step 6" in out
    assert f"cleared  {leftover.name}, which was never whole or half deleted" in out
    assert not leftover.exists()


def test_a_checkpoint_that_is_damaged_is_not_begun_from(command: Any) -> None:
    shard = next(Path("a/checkpoints/step-00000006").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    code, out, err = command("--run", "b", "--fork", "a@6")
    assert (code, out) == (1, "")
    assert "--fork a@6: no checkpoint of a can be used:" in err
    code, out, _ = command("--run", "b", "--fork", "a")
    assert code == 0
    assert "begins   from a/checkpoints/step-00000004" in out
    assert f"passed   {shard} has SHA-256" in out


# ── The state, and the order of samples ─────────────────────────────────────────────────────────────────────────────

CASE = Case("adamw", steps=8, clip=0.5, warmup=3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with batches of eight, all of whose checkpoints are kept; in float64."""
    run = tmp_path_factory.mktemp("other") / "run"
    train(job(), "precision=fp64", run=run, options=tm.RunOptions(save_every="2steps", keep_last="all"))
    return run


def job(**changes: Any) -> Job:
    """The job of `other`, changed; without dropout's and BatchNorm's dependence on how a batch is cut."""
    return replace(build_job(CASE), model=Plain, **changes)


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = torch.nn.Linear(8, 5), torch.nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(x).tanh())


def fork(other: Path, run: Path, job: Job, *, until: int | None = None, save_every: str = NEVER, step: int = 4) -> Ids:
    options = tm.RunOptions(save_every=save_every)
    return train(job, "precision=fp64", run=run, options=options, until=until, fork=f"{other}@{step}")


def ids_at(start: int, stop: int, num_samples: int = CASE.samples) -> Ids:
    positions = torch.arange(start, stop).numpy()
    return list(
        zip(positions.tolist(), Order(num_samples, build_job(CASE).seed).at(positions)[1].tolist(), strict=True)
    )


@pytest.mark.parametrize("batch", [3, 5, 12])
def test_another_global_batch_leaves_no_gap_and_repeats_nothing(other: Path, tmp_path: Path, batch: int) -> None:
    changed = job(global_batch=batch)
    whole = fork(other, tmp_path / "whole", changed)
    assert whole == ids_at(32, 32 + 4 * batch)
    first = fork(other, tmp_path / "parts", changed, until=6, save_every="1steps")
    second = fork(other, tmp_path / "parts", changed, until=7, save_every="1steps")
    last = fork(other, tmp_path / "parts", changed)
    assert first + second + last == whole
    assert ("resumed", 6) in events_of(tmp_path / "parts")
    assert ("resumed", 7) in events_of(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    # And forked again, into the first one's batches.
    again = train(
        job(), "precision=fp64", run=tmp_path / "again", options=tm.RunOptions(), fork=f"{tmp_path / 'parts'}@7"
    )
    assert again == ids_at(32 + 3 * batch, 32 + 3 * batch + 8)


@pytest.mark.parametrize("batch", [5, 16])
def test_a_length_in_epochs_is_that_of_its_samples(other: Path, tmp_path: Path, batch: int) -> None:
    changed = job(global_batch=batch, steps=None, epochs=3)  # 72 samples, of which 32 are behind it
    num_steps = -(-40 // batch)
    seen = fork(other, tmp_path / "a", changed, until=5, save_every="1steps")
    seen += fork(other, tmp_path / "a", changed)
    assert seen == ids_at(32, 72)  # the last batch is what is left of the epochs
    rates = [each["lr"] for each in lines_of(tmp_path / "a/metrics.jsonl")]
    assert rates[0] > rates[-1]  # the schedule goes over the steps that there are
    assert lines_of(tmp_path / "a/metrics.jsonl")[-1]["step"] == 4 + num_steps
    assert fork(other, tmp_path / "a", changed) == []


def fork_on_this_rank(other: Path, run: Path) -> Ids:
    return fork(other, run, job())


def test_another_layout_is_equal_to_rounding(pool: Pool, other: Path, tmp_path: Path) -> None:
    seen = [each for ids in pool.run(fork_on_this_rank, 3, other, tmp_path / "a") for each in ids]
    assert sorted(seen) == ids_at(32, 64)
    assert losses_of(tmp_path / "a") == pytest.approx(losses_of(other)[4:], rel=1e-12, abs=0)
    ours, theirs = read_newest(tmp_path / "a"), read_newest(other)
    for name, each in theirs.tensors.items():
        torch.testing.assert_close(ours.tensors[name], each, rtol=1e-10, atol=1e-12)


def test_other_data_goes_on_at_its_own_position(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fork(other, tmp_path / "a", job(data=Rows(30, seed=4)))
    out = capsys.readouterr().out
    assert "changed  data.length: 24 → 30" in out
    assert "changed  data.fingerprint: " in out
    assert seen == ids_at(32, 64, num_samples=30)


def test_a_fork_killed_before_it_saves_begins_again(other: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(other, copy)
    changed = job(global_batch=6)
    fork(copy, tmp_path / "whole", changed)
    fork(copy, tmp_path / "a", changed, until=7)
    assert len(lines_of(tmp_path / "a/metrics.jsonl")) == 2
    fork(copy, tmp_path / "a", changed)
    assert events_of(tmp_path / "a")[-3:] == [("forked", 4), ("saved", 8), ("finished", 8)]
    assert_same_run(tmp_path / "a", tmp_path / "whole")


def test_a_fork_of_the_newest_stays_with_it(other: Path, tmp_path: Path) -> None:
    """The other run goes on between the fork's first start, which never saved, and its second."""
    copy = tmp_path / "other"
    shutil.copytree(other, copy)
    for step in (6, 8):
        os.rename(copy / f"checkpoints/step-0000000{step}", tmp_path / str(step))
    begin = {"run": tmp_path / "a", "options": tm.RunOptions(), "fork": copy}
    train(job(), "precision=fp64", until=5, **begin)
    for step in (6, 8):
        os.rename(tmp_path / str(step), copy / f"checkpoints/step-0000000{step}")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(job(), "precision=fp64", **begin)
    assert [each for each in events_of(tmp_path / "a") if each[0] == "forked"] == [("forked", 4)] * 2
    assert lines_of(tmp_path / "a/metrics.jsonl") == lines_of(other / "metrics.jsonl")[4:]
    shutil.rmtree(copy / "checkpoints/step-00000004")
    with pytest.raises(RunError, match=r"began from step 4 of .*, which is no more"):
        train(job(), "precision=fp64", **begin | {"run": tmp_path / "b"})


def test_a_fork_saves_early_too(other: Path, tmp_path: Path) -> None:
    fork(other, tmp_path / "a", job(steps=30), save_every="10min")
    assert events_of(tmp_path / "a") == [("forked", 4), ("saved", 24), ("saved", 30), ("finished", 30)]


def test_from_leaves_the_optimizer_and_the_schedule_at_their_start(other: Path, tmp_path: Path) -> None:
    seen = train(
        job(), "precision=fp64", run=tmp_path / "a", options=tm.RunOptions(), weights_from=f"{other}@6", until=3
    )
    assert seen == ids_at(0, 24)
    first = lines_of(tmp_path / "a/metrics.jsonl")[0]
    assert first["lr"] == lines_of(other / "metrics.jsonl")[0]["lr"]
    # Begun again before it saved: from the same weights, and at step 1.
    train(job(), "precision=fp64", run=tmp_path / "a", options=tm.RunOptions(), weights_from=f"{other}@6")
    assert lines_of(tmp_path / "a/metrics.jsonl")[0] == first
    assert [each["step"] for each in lines_of(tmp_path / "a/metrics.jsonl")] == list(range(1, 9))
    assert float(read_newest(tmp_path / "a").tensors["optimizer.up.weight.step"]) == 8


def test_a_resumed_run_that_freezes_what_was_trained_is_refused(other: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(other, copy)

    class Frozen(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.up.bias.requires_grad_(False)

    with pytest.raises(CheckpointError, match=r"up\.bias was trained when the checkpoint was saved, and is frozen"):
        train(replace(job(), model=Frozen), "precision=fp64", run=copy, options=tm.RunOptions())


def test_records_that_were_lost_are_told_and_not_made_up(command: Any) -> None:
    shutil.rmtree("a/checkpoints/step-00000006")
    records = Path("a/metrics.jsonl")
    records.write_bytes(records.read_bytes().split(b"\n")[0] + b"\n")
    code, out, err = command("--run", "a")
    assert (code, err) == (0, "")
    assert "records  metrics.jsonl holds 1 of the 4 steps that are behind this run" in out
    assert [each["step"] for each in lines_of(records)] == [1, 5, 6]
    code, out, _ = command("--run", "b", "--fork", "a@4")
    assert (code, "records" in out) == (0, False)
