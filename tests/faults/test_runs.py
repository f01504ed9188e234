"""Runs whose processes die, raise, leave or are interrupted: who and why is named, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tiny_job import events_of, finish_command, lines_of, run_command, start_command, write_job

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.timeout(300)]

SECONDS_TO_END = 10.0


def wait_for(condition, seconds: float = 120.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill@3", ") was killed by SIGKILL."),
        pytest.param("raise@3", "failed: JobError: RuntimeError: the forward broke, at ", marks=pytest.mark.slow),
        pytest.param("exit@3", "exited with code 3.", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_named_and_the_others_end(tmp_path: Path, fault: str, said: str) -> None:
    write_job(tmp_path)
    code, _, err = run_command(
        *("train", "tiny.py", "--procs", "2", "--run", "a", "--fault", fault, "--fault-rank", "1"), cwd=tmp_path
    )
    assert code == 1
    assert err.startswith("WorkerError: rank 1 (pid ")
    assert said in err
    assert "Traceback" not in err
    assert events_of(tmp_path / "a")[0] == ("started", 0)
    # Rank 0 sees the other one gone, and writes it down before it ends.
    assert events_of(tmp_path / "a")[-1] == ("failed", 2)
    assert time.time() - float((tmp_path / "went_wrong").read_text()) < SECONDS_TO_END


def test_an_error_that_strikes_all_ranks_is_told_once(tmp_path: Path) -> None:
    write_job(tmp_path, ("self.mine = int", "self.mine = True or int"))
    code, _, err = run_command(*("train", "tiny.py", "--procs", "2", "--run", "a", "--fault", "raise@3"), cwd=tmp_path)
    assert code == 1
    assert err.count("the forward broke") == 2  # the message, and the source line that it names
    assert err.count("\n") == 2
    assert events_of(tmp_path / "a") == [("started", 0), ("failed", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["interrupt@3", "terminate@3"])
def test_interrupted_once_all_ranks_stop_at_one_step_and_save(tmp_path: Path, fault: str) -> None:
    write_job(tmp_path)
    code, out, err = run_command(
        *("train", "tiny.py", "--procs", "2", "--run", "a", "--fault", fault, "--sleep", "0.1", "--length", "50"),
        cwd=tmp_path,
    )
    assert (code, err) == (75, "")
    steps = len(lines_of(tmp_path / "a/metrics.jsonl"))
    assert 3 <= steps < 50  # how soon the signal comes through is the machine's affair
    assert events_of(tmp_path / "a") == [("started", 0), ("saved", steps), ("stopped", steps)]
    assert f"stopped on request after step {steps}/50" in out
    assert (tmp_path / "a/model.safetensors").exists()


def test_interrupted_twice_ends_at_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, _, err = run_command(
        *("train", "tiny.py", "--procs", "2", "--run", "a", "--fault", "interrupt twice@3"), cwd=tmp_path
    )
    assert code == 130
    assert "Traceback" not in err


def test_a_single_process_interrupted_twice_ends_at_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    code, _, err = run_command("train", "tiny.py", "--run", "a", "--fault", "interrupt twice@3", cwd=tmp_path)
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("where", "procs"),
    [
        ("the file", 1),
        ("the model", 2),
        pytest.param("the file", 2, marks=pytest.mark.slow),
        pytest.param("the model", 1, marks=pytest.mark.slow),
    ],
)
def test_interrupted_before_the_first_step(tmp_path: Path, where: str, procs: int) -> None:
    mark = tmp_path / "reached"
    pause = f"open({str(mark)!r}, 'w').close(); time.sleep(60)"
    if where == "the file":
        write_job(tmp_path, more=f"\n{pause}\n")
    else:  # one rank builds its model while the other waits for it in compiled code
        on_rank_0 = f"if os.environ.get('RANK', '0') == '0':\n            {pause}\n        "
        write_job(tmp_path, ("self.what, _", f"{on_rank_0}self.what, _"))
    process = start_command("train", "tiny.py", "--procs", str(procs), "--run", "a", cwd=tmp_path)
    wait_for(mark.exists)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, out, err = finish_command(process, SECONDS_TO_END)
    assert code == 130
    assert out == ""
    assert "Traceback" not in err
    assert not (tmp_path / "a/run.json").exists()


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_start_is_refused_while_the_first_goes_on(tmp_path: Path, procs: int) -> None:
    write_job(tmp_path)
    words = ("train", "tiny.py", "--procs", str(procs), "--run", "a")
    first = start_command(*words, "--sleep", "0.2", "--length", "1000", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "a/metrics.jsonl").exists())
    owner = json.loads((tmp_path / "a/owner.json").read_text())
    code, out, err = run_command(*words, cwd=tmp_path)
    assert (code, out) == (1, "")
    assert f"RunError: a is being written by process {owner['pid']} on {owner['host']}." in err
    assert owner == json.loads((tmp_path / "a/owner.json").read_text())
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert finish_command(first)[0] == 75


def test_two_starts_at_once_give_one_run(tmp_path: Path) -> None:
    write_job(tmp_path)
    starts = [start_command("train", "tiny.py", "--run", "a", "--sleep", "1.5", cwd=tmp_path) for _ in range(2)]
    ends = [finish_command(each) for each in starts]
    assert sorted(code for code, _, _ in ends) == [0, 1]
    refused = next(err for code, _, err in ends if code == 1)
    assert "RunError: a is being written by process" in refused
    assert events_of(tmp_path / "a") == [("started", 0), ("saved", 6), ("finished", 6)]
    assert len(lines_of(tmp_path / "a/metrics.jsonl")) == 6


@pytest.mark.slow
def test_after_kill_9_of_the_owner_a_second_start_begins_again(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = ("train", "tiny.py", "--procs", "2", "--run", "a")
    first = start_command(*words, "--sleep", "0.1", "--length", "60", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "a/metrics.jsonl").exists())
    os.kill(json.loads((tmp_path / "a/owner.json").read_text())["pid"], signal.SIGKILL)
    code, _, err = finish_command(first, SECONDS_TO_END + 5)
    assert code == 1
    assert "rank 0 (pid" in err
    assert "was killed by SIGKILL." in err
    code, _, err = run_command("train", "tiny.py", "--run", "a", "--sleep", "0.1", "--length", "60", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert [each["step"] for each in lines_of(tmp_path / "a/metrics.jsonl")] == list(range(1, 61))
    assert events_of(tmp_path / "a")[-1] == ("finished", 60)


def test_a_start_takes_over_a_directory_whose_owner_died_before_it_began(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/lock").touch()
    (tmp_path / "a/owner.json").write_text('{"epoch": 4, "pid": 1, "host": "gone"}')
    code, _, err = run_command("train", "tiny.py", "--run", "a", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "a/owner.json").read_text())["epoch"] == 5


def test_an_owner_that_lost_its_directory_is_refused_at_its_next_write(tmp_path: Path) -> None:
    write_job(tmp_path)
    first = start_command("train", "tiny.py", "--run", "a", "--sleep", "0.2", "--length", "1000", cwd=tmp_path)
    wait_for(lambda: (tmp_path / "a/metrics.jsonl").exists())
    owner = json.loads((tmp_path / "a/owner.json").read_text())
    (tmp_path / "a/owner.json").write_text(json.dumps(owner | {"epoch": owner["epoch"] + 1}))
    lines = len(lines_of(tmp_path / "a/metrics.jsonl"))
    code, _, err = finish_command(first, SECONDS_TO_END)
    assert code == 1
    assert f"a was taken over by another start (owner {owner['epoch'] + 1}; this process is owner" in err
    assert len(lines_of(tmp_path / "a/metrics.jsonl")) <= lines + 1
    assert not (tmp_path / "a/model.safetensors").exists()


def test_ranks_with_different_jobs_are_told_the_first_difference(tmp_path: Path) -> None:
    write_job(tmp_path, ("Rows(samples)", "Rows(samples + int(os.environ['RANK']))"))
    code, out, err = run_command("train", "tiny.py", "--procs", "2", "--run", "a", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("RunError: rank 0 has data.length=20 and rank 1 has data.length=21.")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_ranks_with_different_first_weights_are_told_which(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        (
            "self.what, _",
            "nn.init.normal_(self.down.bias, generator=torch.Generator().manual_seed(os.getpid())); self.what, _",
        ),
    )
    code, out, err = run_command("train", "tiny.py", "--procs", "2", "--run", "a", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("RunError: down.bias has other first values on rank 1 than on rank 0.")


def test_a_refused_start_of_several_processes_is_told_once(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "a").write_text("a file")
    code, out, err = run_command("train", "tiny.py", "--procs", "2", "--run", "a", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("RunError: a cannot be written: File exists.")
    assert err.count("\n") == 2
