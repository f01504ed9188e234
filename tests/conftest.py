"""What all tests share: one thread per process, the pool of gloo workers, and a check that no process is left."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported, here and in every process that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool, stop_server

_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "TRIMARAN_")
_LAUNCHER_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_MARK = "TEST_PROCESS_MARK"


@pytest.fixture(autouse=True, scope="session")
def _started_alone() -> None:
    """Tests behave alike in a Slurm allocation and on a laptop: no launcher's variables."""
    for name in list(os.environ):
        if name.startswith(_LAUNCHER_PREFIXES) or name in _LAUNCHER_NAMES:
            del os.environ[name]


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo workers: `pool.run(fn, world_size, *args)` gives each rank's result; see pool.py."""
    pool = Pool()
    yield pool
    pool.close()
    stop_server()


@pytest.fixture
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which any process that it started is alive, orphans and grandchildren included (Linux)."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, mark)
    yield
    left = _wait_for_marked_processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left alive: {left}"


def _wait_for_marked_processes(mark: str, seconds: float = 2.0) -> dict[int, str]:
    """Processes, with their commands, that still carry the test's mark after a moment to finish dying."""
    deadline = time.monotonic() + seconds
    while (left := _marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _marked_processes(mark: str) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # ended meanwhile, or another user's
    return found
