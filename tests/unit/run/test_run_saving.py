"""When a run saves, what it keeps, and what it says of it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trimaran as tm
from tiny_job import events_of, lines_of, write_job
from trimaran.checkpoint.finding import list_steps
from trimaran.cli.job_file import load_job_function
from trimaran.errors import CheckpointError, UsageError
from trimaran.run import saving
from trimaran.run.saving import FIRST_SAVE_STEP, REQUEST_FILE, SaveTimes, retention_of

A = Path("a")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny job's function; the test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_job_function(write_job(tmp_path))


def saved_steps(run: Path = A) -> list[int]:
    """The steps that the run says it saved."""
    return [step for event, step in events_of(run) if event == "saved"]


def options(**values: Any) -> tm.RunOptions:
    return tm.RunOptions(**{"keep_last": "all"} | values)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("10min", SaveTimes(600.0, None)),
        ("200steps", SaveTimes(None, 200)),
        ("10min 200steps", SaveTimes(600.0, 200)),
        ("2epochs", SaveTimes(None, 5)),  # of 20 samples in batches of 8
        ("0.1epochs", SaveTimes(None, 1)),
        ("never", SaveTimes(None, None)),
    ],
)
def test_times_of_a_job(job: Any, text: str, times: SaveTimes) -> None:
    found = SaveTimes.of(options(save_every=text), job())
    assert found == times


def test_retention_of_a_job(job: Any) -> None:
    kept = retention_of(options(keep_last=3, keep_every="2epochs", keep_best="error:max"), job())
    assert (kept.last, kept.every, kept.best) == (3, 5, ("error", "max"))
    kept = retention_of(options(), job())
    assert (kept.last, kept.every, kept.best) == (None, None, None)


def test_a_run_saves_early_once_and_at_its_end(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tm.train(job(length=45), run="a", options=options())
    assert saved_steps() == [FIRST_SAVE_STEP, 45] == [20, 45]
    assert list_steps(A) == [45, 20]
    printed = capsys.readouterr().out
    for step in (20, 45):
        assert f"saved    step {step}  " in printed
    assert ", training waited " in printed
    detail = next(each["detail"] for each in lines_of(A / "events.jsonl") if each["event"] == "saved")
    assert " training waited " in detail
    assert " written in " in detail


def test_every_so_many_steps_and_never_twice(job: Any) -> None:
    tm.train(job(length=9), run="a", options=options(save_every="3steps"))
    assert saved_steps() == [3, 6, 9]
    tm.train(job(length=9), run="a", options=options(save_every="3steps"))  # nothing is left to do, or to save
    assert saved_steps() == [3, 6, 9]


def test_a_short_run_saves_at_its_end(job: Any) -> None:
    tm.train(job(), run="a", options=options())
    assert saved_steps() == [6]


def test_never_is_never(job: Any) -> None:
    tm.train(job(length=25), run="a", options=options(save_every="never"))
    assert saved_steps() == []
    assert not (A / "checkpoints").exists()


def train_until(job: Any, step: int, **values: Any) -> None:
    """A run that stops on request after `step`."""
    with tm.start(job, run="a", options=options(**values)) as run:
        for batch in run:
            run.step(batch)
            if batch.index + 2 == step:  # it is agreed under the next step
                run.ask_to_stop("enough")


def test_a_resumed_run_has_saved_before_and_a_fork_has_not(job: Any) -> None:
    train_until(job(length=45), 5)
    assert saved_steps() == [5]
    tm.train(job(length=45), run="a", options=options())
    assert saved_steps() == [5, 45]
    tm.train(job(length=80), run="b", options=options(), fork="a@5")
    assert saved_steps(Path("b")) == [5 + FIRST_SAVE_STEP, 80]


def test_the_clock_is_one_that_does_not_jump(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    wall = iter([0.0, 4e9, -1.0] * 10_000)
    monkeypatch.setattr(time, "time", lambda: next(wall))
    with tm.start(job(length=12), run="a", options=options(save_every="1min")) as run:
        for batch in run:
            run.step(batch)
            now[0] += 61.0 if batch.index in (3, 8) else 1.0
    # Asked while the step before the next is made, and done at its edge.
    assert saved_steps() == [5, 10, 12]


def test_a_file_asks_for_a_save(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.0)
    with tm.start(job(length=8), run="a", options=options(save_every="never")) as run:
        for batch in run:
            run.step(batch)
            if batch.index == 2:
                (A / REQUEST_FILE).touch()
    assert not (A / REQUEST_FILE).exists()
    assert saved_steps() == [4, 8]  # who asked once wants the end too


def test_a_folder_of_that_name_asks_for_nothing(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LOOK_SECONDS", 0.0)
    with tm.start(job(), run="a", options=options(save_every="never")) as run:
        (A / REQUEST_FILE).mkdir()
        for batch in run:
            run.step(batch)
    assert saved_steps() == []


def test_a_signal_asks_for_a_save(job: Any) -> None:
    with tm.start(job(length=8), run="a", options=options(save_every="never")) as run:
        for batch in run:
            run.step(batch)
            if batch.index == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert saved_steps() == [4, 8]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"keep_last": 1}, [9]),
        ({"keep_last": 2}, [9, 8]),
        ({"keep_last": "all"}, [9, 8, 7, 6, 5, 4, 3, 2, 1]),
        ({"keep_last": 1, "keep_every": "4steps"}, [9, 8, 4]),
        ({}, [9, 8]),
    ],
)
def test_what_is_kept(job: Any, values: dict[str, Any], kept: list[int]) -> None:
    tm.train(job(length=9), run="a", options=tm.RunOptions(save_every="1steps", **values))
    assert list_steps(A) == kept
    assert saved_steps() == list(range(1, 10))


@pytest.mark.parametrize(("figure", "side"), [("loss", min), ("error:min", min), ("error:max", max)])
def test_the_best_is_saved_and_kept(job: Any, figure: str, side: Any) -> None:
    chosen = tm.RunOptions(evaluate_every="2steps", save_every="never", keep_last=1, keep_best=figure)
    tm.train(job(length=12, lr=0.3), run="a", options=chosen)
    name = figure.partition(":")[0]
    values = {
        each["step"]: each["validation"][name] for each in lines_of(A / "metrics.jsonl") if each.get("validation")
    }
    assert len(values) == 6
    best = side(values, key=values.__getitem__)
    bests = [step for step in values if values[step] == side(values[each] for each in values if each <= step)]
    assert saved_steps() == sorted({*bests, 12})
    assert list_steps(A) == sorted({best, 12}, reverse=True)


def test_the_best_so_far_is_known_after_a_resume(job: Any) -> None:
    chosen: dict[str, Any] = {"evaluate_every": "1steps", "keep_best": "error:max", "keep_last": 1}
    train_until(job(length=12), 6, **chosen)
    best = list_steps(A)[-1]
    tm.train(job(length=12), run="a", options=options(**chosen))
    values = {each["step"]: each["validation"]["error"] for each in lines_of(A / "metrics.jsonl")}
    assert max(values, key=values.__getitem__) == best == 1  # the error falls: the first is the largest
    assert list_steps(A) == [12, 1]
    assert saved_steps() == [1, 6, 12]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep_best": "loss"}, "keep_best='loss', and the run never evaluates before its end."),
        ({"keep_best": "acc:max", "evaluate_every": "1steps"}, "keep_best='acc:max' names no figure of this job."),
    ],
)
def test_a_best_that_cannot_be_is_refused(job: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        tm.start(job(), run="a", options=options(**values))
    assert caught.value.value == said
    with pytest.raises(UsageError, match="never evaluates"):
        tm.start(job(valid=0), run="b", options=options(keep_best="loss", evaluate_every="1steps"))


def test_want_of_memory_is_told_once(
    job: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(range(500, 0, -10))
    monkeypatch.setattr("trimaran.checkpoint.saving.available_host_bytes", lambda: next(left))
    tm.train(job(length=8), run="a", options=options(save_every="2steps"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "host memory" in line]
    assert len(lines) == 1
    assert lines[0].startswith("save     a copy to save from needs ")
    assert "500 B are free: training waits until the checkpoint is written" in lines[0]
    assert saved_steps() == [2, 4, 6, 8]


def test_a_failure_in_the_background_ends_the_run_at_the_next_step(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def train() -> None:
        with tm.start(job(length=400), run="a", options=options(save_every="10min 10steps")) as run:
            for batch in run:
                run.step(batch)
                if batch.index == 12:
                    monkeypatch.setattr("trimaran.checkpoint.saving.write_shard", full)
                while batch.index == 20 and not run._saving.has_failed:
                    time.sleep(0.001)

    with pytest.raises(CheckpointError) as caught:
        train()
    assert caught.value.value == "a/checkpoints/step-00000020 cannot be written: No space left on device."
    assert len(lines_of(A / "metrics.jsonl")) < 25
    assert list_steps(A) == [10]
    assert events_of(A)[-1][0] == "failed"
    assert "cannot be written" in lines_of(A / "events.jsonl")[-1]["detail"]


def test_an_error_of_the_loop_lets_a_save_end(job: Any) -> None:
    def train() -> None:
        with tm.start(job(length=10), run="a", options=options(save_every="3steps")) as run:
            for batch in run:
                run.step(batch)
                if batch.index == 3:
                    raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        train()
    assert events_of(A)[-2:] == [("saved", 3), ("failed", 3)]
    assert list_steps(A) == [3]


def test_a_save_that_fails_at_the_end_is_recorded(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trimaran.checkpoint.saving.write_shard", full)
    with pytest.raises(CheckpointError, match="step-00000006 cannot be written"):
        tm.train(job(), run="a", options=options())
    assert events_of(A) == [("started", 0), ("failed", 6)]
    assert not (A / "model.safetensors").exists()
