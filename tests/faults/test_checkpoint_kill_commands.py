"""The command line killed, stopped and asked to save while it saves: the same command again goes on where it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import trimaran as tm
from pool import Pool
from resuming import train
from tiny_job import events_of, finish_command, lines_of, run_command, start_command, write_job
from trimaran.checkpoint import list_steps
from trimaran.cli.job_file import load_job_function
from trimaran.phases import COMMIT_POINTS, WRITE_POINTS
from trimaran.records import METRICS_FILE, WEIGHTS_FILE

pytestmark = [pytest.mark.usefixtures("no_process_left"), pytest.mark.timeout(600)]

LENGTH = 24
TRAIN = ("train", "tiny.py", "--procs", "2", "--run", "a", "--length", str(LENGTH), "--save-every", "2steps")
SLOWLY = "slowly"
"""A file beside the job; while it is there, a step takes a while."""


def write_slow_job(folder: Path) -> None:
    write_job(folder, ("time.sleep(self.sleep)", f"time.sleep(0.25 if os.path.exists({SLOWLY!r}) else 0)"))


def train_undisturbed(folder: Path) -> None:
    job = load_job_function(folder / "tiny.py")
    train(job(length=LENGTH), run=folder / "a", options=tm.RunOptions(save_every="never"))


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on two ranks that know nothing of a command line."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_slow_job(folder)
    pool.run(train_undisturbed, 2, folder)
    return folder / "a"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_event(run: Path, event: str, after: int = 0) -> bool:
    events = run / "events.jsonl"
    return events.exists() and any(each["event"] == event for each in lines_of(events)[after:])


def assert_same(run: Path, undisturbed: Path) -> None:
    for name in (METRICS_FILE, WEIGHTS_FILE):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes()
    assert not list(run.glob("checkpoints/*.tmp-*"))


def finish(folder: Path, undisturbed: Path, *more: str, resumes_at: tuple[int, ...]) -> str:
    """The same command again, to the end; what it printed."""
    code, out, err = run_command(*TRAIN, *more, cwd=folder)
    assert (code, [line for line in err.splitlines() if not line.startswith("drill")]) == (0, [])
    assert [each for each in events_of(folder / "a") if each[0] == "resumed"] == [("resumed", at) for at in resumes_at]
    assert_same(folder / "a", undisturbed)
    return out


KILLS = [(point, rank) for point in WRITE_POINTS for rank in (0, 1) if rank == 0 or point not in COMMIT_POINTS]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), KILLS)
def test_a_rank_killed_while_it_saves(tmp_path: Path, undisturbed: Path, point: str, rank: int) -> None:
    write_slow_job(tmp_path)
    drill = ("--keep-last", "1", "--drill", f"kill rank={rank} step=4 phase={point}")
    code, _, err = run_command(*TRAIN, *drill, cwd=tmp_path)
    assert code == 1
    assert f"WorkerError: rank {rank} (pid " in err
    assert ") was killed by SIGKILL." in err
    step = 4 if point in ("save:after-rename", "save:during-deletion") else 2
    out = finish(tmp_path, undisturbed, *drill, resumes_at=(step,))
    assert f"begins   from a/checkpoints/step-0000000{step}" in out


def kill_at_drill(folder: Path, whom: str, *words: str) -> list[int]:
    """Starts the command, kills when rank 0 dwells in its slow drill, and waits for the end; the workers' ids."""
    process = start_command(*TRAIN, *words, cwd=folder)
    wait_for(lambda: any(folder.glob("a/drills/slow-*-rank0")), process)
    workers = children_of(process.pid)
    assert len(workers) == 2
    for pid in workers if whom == "all" else [process.pid]:
        os.kill(pid, signal.SIGKILL)
    code, _, _ = finish_command(process, 30)
    assert code == (1 if whom == "all" else -signal.SIGKILL)
    return workers


def test_a_rank_is_killed_and_then_the_agent(tmp_path: Path, undisturbed: Path) -> None:
    write_slow_job(tmp_path)
    kill, slow = "kill rank=1 step=4 phase=save:before-manifest", "slow rank=0 step=8 phase=save:mid-shard seconds=60"
    drills = ("--drill", kill, slow)
    code, _, err = run_command(*TRAIN, *drills, cwd=tmp_path)
    assert code == 1
    assert "WorkerError: rank 1 (pid " in err
    workers = kill_at_drill(tmp_path, "agent", *drills)
    # At once: the new start waits until the dying let go.
    out = finish(tmp_path, undisturbed, *drills, resumes_at=(2, 6))
    assert "begins   from a/checkpoints/step-00000006" in out
    assert not any(map(is_alive, workers))


ENDS = [(point, whom) for point in WRITE_POINTS for whom in ("agent", "all")]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "whom"), ENDS)
def test_the_agent_or_all_killed_while_they_save(tmp_path: Path, undisturbed: Path, point: str, whom: str) -> None:
    write_slow_job(tmp_path)
    drill = ("--keep-last", "1", "--drill", f"slow rank=0 step=4 phase={point} seconds=60")
    workers = kill_at_drill(tmp_path, whom, *drill)
    # At once: the new start waits until the dying let go.
    finish(
        tmp_path, undisturbed, *drill, resumes_at=(4 if point in ("save:after-rename", "save:during-deletion") else 2,)
    )
    assert not any(map(is_alive, workers))


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, undisturbed: Path) -> None:
    """Agent and workers, until three starts have continued from a step above 0."""
    write_slow_job(tmp_path)
    (tmp_path / SLOWLY).touch()
    moments = random.Random(4)
    run = tmp_path / "a"

    def begins() -> list[int]:
        """The steps from which the starts so far went on."""
        if not (run / "events.jsonl").exists():
            return []
        return [step for event, step in events_of(run) if event in ("started", "resumed")]

    for _ in range(8):
        before = len(begins())
        process = start_command(*TRAIN, cwd=tmp_path)
        wait_for(lambda before=before: len(begins()) > before, process)  # type: ignore[misc]
        time.sleep(moments.uniform(0.3, 1.4))
        for pid in (process.pid, *children_of(process.pid)):
            os.kill(pid, signal.SIGKILL)
        assert finish_command(process, 30)[0] == -signal.SIGKILL
        if sum(step > 0 for step in begins()) >= 3:
            break
    (tmp_path / SLOWLY).unlink()
    code, _, err = run_command(*TRAIN, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert sum(step > 0 for step in begins()) >= 3
    assert_same(run, undisturbed)


def test_asked_to_save_and_to_leave(tmp_path: Path, undisturbed: Path) -> None:
    """SIGUSR1 to the launcher and the file "save" save at once and go on; SIGTERM saves and leaves with 75."""
    write_slow_job(tmp_path)
    (tmp_path / SLOWLY).touch()
    run = tmp_path / "a"
    words = [*TRAIN[:-1], "10min"]  # by itself it would save at the end alone
    process = start_command(*words, cwd=tmp_path)
    wait_for(lambda: has_event(run, "started"), process)
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: has_event(run, "saved"), process)
    first = list_steps(run)
    (run / "save").touch()
    wait_for(lambda: has_event(run, "saved", after=2), process)
    assert not (run / "save").exists()
    second = list_steps(run)
    assert len(first) == 1
    assert len(second) == 2
    process.send_signal(signal.SIGTERM)
    code, out, err = finish_command(process, 30)
    assert (code, err) == (75, "")
    stopped = lines_of(run / METRICS_FILE)[-1]["step"]
    assert list_steps(run)[0] == stopped < LENGTH
    assert events_of(run) == [
        *[("started", 0), ("saved", first[0]), ("saved", second[0]), ("saved", stopped), ("stopped", stopped)]
    ]
    assert f"stopped on request after step {stopped}/{LENGTH}" in out
    (tmp_path / SLOWLY).unlink()
    finish(tmp_path, undisturbed, resumes_at=(stopped,))
