"""The run as a user's own loop: breaks, exceptions, steps by hand, and use outside the main thread."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import trimaran as tm
from tiny_job import events_of, lines_of, losses_of, write_job
from trimaran.cli.job_file import load_job_function
from trimaran.errors import JobError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny job's function; the test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_job_function(write_job(tmp_path))


def test_a_loop_of_steps_is_what_train_does(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tm.train(job(), run="a")
    printed = capsys.readouterr().out
    with tm.start(job(), run="b") as run:
        for batch in run:
            run.step(batch)
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()
    assert trained.validation == run.validation
    assert set(trained.validation or ()) == {"loss", "error"}
    assert trained.last_loss == losses_of(Path("a"))[-1]
    assert printed.count("step") == capsys.readouterr().out.count("step")


def test_a_break_ends_the_run_as_finished(job: Any) -> None:
    with tm.start(job(), run="a") as run:
        for batch in run:
            out = run.step(batch)
            if out.index == 2:
                break
    assert out.loss == losses_of(Path("a"))[-1]
    assert events_of(Path("a")) == [("started", 0), ("saved", 3), ("finished", 3)]
    assert "validation" in lines_of(Path("a/metrics.jsonl"))[-1]
    assert Path("a/model.safetensors").exists()


def test_an_exception_in_the_loop_is_recorded_and_goes_on(job: Any) -> None:
    def loop() -> None:
        with tm.start(job(), run="a") as run:
            for batch in run:
                run.step(batch)
                if batch.index == 1:
                    raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        loop()
    assert events_of(Path("a"))[-1][0] == "failed"
    assert lines_of(Path("a/events.jsonl"))[-1]["detail"] == "ZeroDivisionError: mine"
    assert not Path("a/model.safetensors").exists()
    tm.train(job(), run="b")  # nothing of the failed one stands in the way


def test_gradients_can_be_seen_between_accumulate_and_update(job: Any) -> None:
    norms = []
    with tm.start(job(), run="a") as run:
        for batch in run:
            run.engine.accumulate(batch)
            norms.append(sum(float(each.grad.norm()) ** 2 for each in run.engine.model.parameters()) ** 0.5)
            run.engine.update()
    assert norms == pytest.approx([each["grad_norm"] for each in lines_of(Path("a/metrics.jsonl"))], rel=1e-6)
    tm.train(job(), run="b")
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()


def test_a_loop_that_does_not_step_is_refused(job: Any) -> None:
    def loop(missed: int, path: str) -> None:
        with tm.start(job(), run=path) as run:
            for batch in run:
                run.engine.accumulate(batch)
                if batch.index != missed:
                    run.engine.update()

    for missed, path in ((0, "a"), (1, "b")):
        with pytest.raises(JobError, match=f"the loop went past batch {missed} without a step"):
            loop(missed, path)


def test_a_run_works_outside_the_main_thread(job: Any) -> None:
    finished: list[tm.Run] = []
    thread = threading.Thread(target=lambda: finished.append(tm.train(job(), run="a")))
    thread.start()
    thread.join()
    assert [run.last_step for run in finished] == [6]


def test_a_run_can_be_asked_to_stop_from_the_loop(job: Any) -> None:
    with tm.start(job(), run="a") as run:
        for batch in run:
            run.step(batch)
            run.ask_to_stop("enough")
    assert run.stopped
    assert lines_of(Path("a/events.jsonl"))[-1]["detail"] == "enough"


def test_an_evaluation_at_any_time_changes_nothing_but_the_figures(job: Any) -> None:
    with tm.start(job(), run="a") as run:
        for batch in run:
            run.step(batch)
            assert set(run.evaluate()) == {"loss", "error"}
    tm.train(job(), run="b")
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()


def test_an_evaluation_without_validation_data_is_refused(job: Any) -> None:
    with pytest.raises(JobError, match="no validation data"), tm.start(job(valid=0), run="a") as run:
        run.evaluate()


def test_a_run_that_is_left_at_once_is_finished_without_a_step(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with tm.start(job(), run="a"):
        pass
    assert events_of(Path("a")) == [("started", 0), ("finished", 0)]
    assert "nan" not in capsys.readouterr().out


def test_a_start_that_fails_gives_everything_back(job: Any) -> None:
    before = threading.active_count()
    with pytest.raises(tm.errors.LayoutError):
        tm.start(job(), "dp=2", run="a")
    with pytest.raises(tm.errors.JobError):
        tm.start(job(length=0), run="a")
    assert threading.active_count() == before
    assert not Path("a").exists()


def test_a_layout_object_is_as_good_as_its_text(job: Any) -> None:
    tm.train(job(), tm.Layout(micro_batch=2), run="a")
    tm.train(job(), "micro_batch=2", run="b")
    assert Path("a/metrics.jsonl").read_bytes() == Path("b/metrics.jsonl").read_bytes()


def test_a_second_loop_over_a_run_is_refused(job: Any) -> None:
    with tm.start(job(), run="a") as run:
        for batch in run:
            run.step(batch)
            break
        with pytest.raises(JobError, match="iterated over a second time"):
            next(iter(run))
    assert losses_of(Path("a")) == [run.last_loss]


def test_a_second_step_on_a_batch_is_refused(job: Any) -> None:
    with tm.start(job(), run="a") as run:
        for batch in run:
            run.step(batch)
            with pytest.raises(JobError, match=f"batch {batch.index} was stepped on already"):
                run.step(batch)
    assert run.engine.num_updates == run.last_step
