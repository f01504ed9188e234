"""Workers that die, raise, exit or hang, and a launcher that is interrupted or killed: who is named, who is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimaran.errors import JobError, UsageError, WorkerError
from trimaran.world import workers
from trimaran.world.environment import PARENT_PIPE
from trimaran.world.workers import start_workers

pytestmark = pytest.mark.usefixtures("no_process_left")

WORKER = '''
import json, os, pathlib, signal, sys, time
from trimaran.errors import DataError, JobError
from trimaran.world.environment import discover, record_failure, watch_parent

kind, here = sys.argv[1], pathlib.Path(sys.argv[2])
place = discover()
signals = []

def ready(**facts):
    (here / "new").mkdir(exist_ok=True)
    file = here / "new" / f"{place.rank}.json"
    file.write_text(json.dumps({"pid": os.getpid(), **facts}))
    file.rename(here / f"{place.rank}.json")

def all_ready():
    ready()
    while len(list(here.glob("*.json"))) < place.world_size:
        time.sleep(0.01)

def fail(error):
    try:
        raise error
    except Exception as caught:
        record_failure(caught)
    sys.exit(getattr(error, "exit_code", 1))

def keep(number, frame):
    signals.append(signal.Signals(number).name)

def save_and_leave():
    """Leave a while after the first signal, so that a second delivery would be seen."""
    signal.signal(signal.SIGINT, keep)
    signal.signal(signal.SIGTERM, keep)
    ready()
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)
    (here / f"signals{place.rank}").write_text(" ".join(signals))
    sys.exit(75)

'''

KINDS = {
    "facts": "ready(place=vars(place), threads=os.environ['OMP_NUM_THREADS'], session=os.getsid(0))",
    "killed": """
all_ready()
os.kill(os.getpid(), signal.SIGKILL) if place.rank == 1 else time.sleep(60)""",
    "stubborn": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
all_ready()
fail(DataError("Sample 7 is empty.", "Samples have tokens.", "Drop it.")) if place.rank == 2 else time.sleep(60)""",
    "exits": "sys.exit(3) if place.rank == 1 else time.sleep(60)",
    "saved": "sys.exit(75)",
    "alike": """
time.sleep(0.5 * place.rank)
fail(JobError("The job has no model.", "A job has one.", "Write model=."))""",
    "leaves": "save_and_leave()",
    "deaf": """
signal.signal(signal.SIGINT, keep)
signal.signal(signal.SIGTERM, keep)
ready()
while True: time.sleep(1)""",
    "sleeps": "ready(); time.sleep(60)",
    "loses_peer": """
import torch
from trimaran.layout import Layout
from trimaran.world.groups import open_world
world = open_world(place, Layout().resolve(world_size=2, global_batch=2), device="cpu", timeout_seconds=30)
ready()
if place.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
try:
    while True: world.barrier()
except Exception as error: fail(error)""",
}

LAUNCHER = """
import sys
from trimaran.errors import TrimaranError
from trimaran.world import workers
from trimaran.world.environment import PARENT_PIPE
workers._START_UP_SECONDS = float(sys.argv[1])
try:
    code = workers.start_workers([sys.executable, *sys.argv[2:]], num_procs=2, grace_seconds=0.5)
except TrimaranError as error:
    code = error.exit_code
    print(error)
sys.exit(code)
"""

Launch = Callable[..., int]


def wait_for_workers(here: Path, count: int) -> list[dict]:
    deadline = time.monotonic() + 30
    while len(list(here.glob("*.json"))) < count:
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.02)
    return [json.loads((here / f"{rank}.json").read_text()) for rank in range(count)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def script_of(here: Path, kind: str) -> list[str]:
    script = here / "worker.py"
    script.write_text(WORKER + KINDS[kind])
    return [str(script), kind, str(here)]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`start_workers` in this process; returns what it returns and raises what it raises."""

    def start(kind: str, num_procs: int = 2, **options: object) -> int:
        return start_workers([sys.executable, *script_of(tmp_path, kind)], num_procs=num_procs, **options)

    return start


@pytest.fixture
def launcher(tmp_path: Path):
    """A launcher in a process of its own, in a process group of its own as in a terminal."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str, start_up_seconds: float = 60) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCHER, str(start_up_seconds), *script_of(tmp_path, kind)]
        process = subprocess.Popen(command, process_group=0, text=True, stdout=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_workers_find_their_place(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert launch("facts", 3, threads_per_worker=2) == 0
    facts = wait_for_workers(tmp_path, 3)
    assert [fact["place"]["rank"] for fact in facts] == [0, 1, 2]
    assert {fact["place"]["world_size"] for fact in facts} == {3}
    assert {fact["place"]["launcher"] for fact in facts} == {"trimaran"}
    assert {fact["place"]["master_addr"] for fact in facts} == {"127.0.0.1"}
    assert [fact["place"]["store_fd"] is None for fact in facts] == [False, True, True]
    assert {fact["threads"] for fact in facts} == {"2"}
    assert all(fact["session"] == fact["pid"] for fact in facts)


def test_threads_share_the_cores_unless_the_user_says_otherwise(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch("facts", 1)
    assert wait_for_workers(tmp_path, 1)[0]["threads"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    launch("facts", 1)
    assert wait_for_workers(tmp_path, 1)[0]["threads"] == str(len(os.sched_getaffinity(0)))


def test_a_killed_worker_is_named(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        launch("killed", 3)
    pids = [fact["pid"] for fact in wait_for_workers(tmp_path, 3)]
    assert caught.value.value == f"rank 1 (pid {pids[1]}) was killed by SIGKILL."
    assert "memory" in caught.value.remedy
    assert not any(map(is_alive, pids))


def test_a_raising_worker_is_named_and_those_that_ignore_sigterm_are_killed(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 2 \(pid \d+\) failed: DataError: Sample 7 is empty") as caught:
        launch("stubborn", 3, grace_seconds=0.5)
    assert caught.value.remedy == "Drop it."
    assert "worker.py" in caught.value.__notes__[0]
    assert not any(is_alive(fact["pid"]) for fact in wait_for_workers(tmp_path, 3))


def test_a_worker_that_exits_is_named(launch: Launch) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 \(pid \d+\) exited with code 3"):
        launch("exits")


def test_all_stopped_after_saving(launch: Launch) -> None:
    assert launch("saved") == 75


def test_an_error_of_all_ranks_is_shown_as_itself(launch: Launch) -> None:
    with pytest.raises(JobError, match="The job has no model"):
        launch("alike", 3)


@pytest.mark.parametrize(("kind", "expected"), [("saved", 75), ("exits", None), ("stubborn", None)])
def test_the_elastic_agent_takes_over(
    kind: str, expected: int | None, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_START_UP_SECONDS", 0.0)
    if expected is not None:
        assert launch(kind) == expected
        return
    with pytest.raises(WorkerError):
        launch(kind, 3, grace_seconds=0.5)


def test_a_lost_peer_is_not_blamed(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
        launch("loses_peer")


@pytest.mark.parametrize("start_up_seconds", [60, 0])
def test_ctrl_c_once_saves_and_leaves(start_up_seconds: float, launcher, tmp_path: Path) -> None:
    process = launcher("leaves", start_up_seconds)
    wait_for_workers(tmp_path, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(20) == 75
    assert [(tmp_path / f"signals{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]


def test_sigterm_is_passed_on_once(launcher, tmp_path: Path) -> None:
    process = launcher("leaves")
    wait_for_workers(tmp_path, 2)
    process.terminate()
    time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 75
    assert [(tmp_path / f"signals{rank}").read_text() for rank in range(2)] == ["SIGTERM", "SIGTERM"]


def test_ctrl_c_twice_ends_all_now(launcher, tmp_path: Path) -> None:
    process = launcher("deaf")
    pids = [fact["pid"] for fact in wait_for_workers(tmp_path, 2)]
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    assert not any(map(is_alive, pids))


def test_workers_that_know_no_signal_end_by_it_quietly(launcher, tmp_path: Path) -> None:
    process = launcher("sleeps")
    wait_for_workers(tmp_path, 2)
    process.terminate()
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (143, "")


def test_workers_die_with_a_killed_launcher(launcher, tmp_path: Path) -> None:
    process = launcher("deaf")
    pids = [fact["pid"] for fact in wait_for_workers(tmp_path, 2)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def test_where_the_kernel_does_not_end_workers_a_pipe_does(tmp_path: Path) -> None:
    code = "import sys, time; sys.platform = 'elsewhere'; from trimaran.world.environment import watch_parent"
    reading, writing = os.pipe()
    environ = os.environ | {PARENT_PIPE: str(reading)}
    command = [sys.executable, "-c", f"{code}; watch_parent(); print('ready', flush=True); time.sleep(60)"]
    with subprocess.Popen(command, env=environ, pass_fds=[reading], stdout=subprocess.PIPE, text=True) as process:
        os.close(reading)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        os.close(writing)
        assert process.wait(10) == -signal.SIGKILL


def test_a_taken_port_is_named(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"port={port} is taken"):
            launch("facts", port=port)


def test_a_given_port_is_used(launch: Launch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert launch("facts", port=port) == 0
    assert wait_for_workers(tmp_path, 2)[1]["place"]["master_port"] == port


def test_no_workers_are_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match="procs=0"):
        launch("facts", 0)


def test_the_launcher_starts_without_torch() -> None:
    code = "import sys, trimaran.world.workers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
