"""Loader processes: they end with their iteration, with their trainer, and not before."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trimaran.data import BatchLoader, Order, build_loader
from trimaran.errors import DataError

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="fork and PR_SET_PDEATHSIG are Linux's")


class Processes:
    """Sample i is the process that loaded it, which kills itself at sample `kills` and is stuck from `hangs` on."""

    def __init__(self, kills: int = 40, hangs: int = 40) -> None:
        self.kills, self.hangs = kills, hangs

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index >= self.hangs:
            time.sleep(1000)
        return {"pid": os.getpid()}


def loader(source: Any, num_workers: int = 2) -> BatchLoader:
    order = Order(40, shuffle=False)
    sizes = {"global_batch": 2, "total_samples": 40, "dp": 1, "dp_rank": 0, "micro_batch": 1}
    return build_loader(source, collate=None, order=order, num_workers=num_workers, **sizes)  # type: ignore[arg-type]


def names_of_children() -> set[str]:
    return {child.name for child in multiprocessing.active_children()}


def pids(batch: Any) -> set[int]:
    return {int(micro_batch.tensors["pid"]) for micro_batch in batch.micro_batches}


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_load_and_end_with_the_last_batch() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    seen = set.union(*(pids(batch) for batch in loader(Processes())))
    assert len(seen) == 2
    assert os.getpid() not in seen
    assert not any(map(exists, seen))
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.parametrize("how", ["break", "close", "drop"])
def test_an_abandoned_iteration_ends_its_workers(how: str) -> None:
    children = names_of_children()  # other tests keep a pool of workers
    batches = loader(Processes())
    if how == "break":
        for batch in batches:  # noqa: B007
            break
    else:
        iteration = iter(batches)
        batch = next(iteration)
        if how == "close":
            batches.close()
            assert next(iteration, None) is None
        else:
            del iteration
    gc.collect()
    assert not any(map(exists, pids(batch)))
    assert not names_of_children() - children


@pytest.mark.timeout(8)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_stuck_workers_end_too() -> None:
    """torch would wait for them one after the other, ten seconds each."""
    children = names_of_children()  # other tests keep a pool of workers
    iteration = iter(loader(Processes(hangs=2)))
    batch = next(iteration)
    del iteration
    assert not any(map(exists, pids(batch)))
    assert not names_of_children() - children


def test_close_before_and_after_the_fact_is_harmless() -> None:
    batches = loader(Processes())
    batches.close()
    assert len(list(batches)) == 20
    batches.close()


@linux_only
def test_a_killed_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # How long torch waits for a sample before it looks whether its workers are alive: 5 s.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    batches = iter(loader(Processes(kills=6)))
    first = pids(next(batches))
    with pytest.raises(DataError) as caught:
        list(batches)
    assert "SIGKILL" in caught.value.value
    assert any(str(pid) in caught.value.value for pid in first)
    assert not any(map(exists, first))


@linux_only
def test_workers_ignore_the_signal_that_asks_the_trainer_to_save() -> None:
    batches = iter(loader(Processes()))
    seen = pids(next(batches))
    for pid in seen:
        os.kill(pid, signal.SIGTERM)
        assert os.getpgid(pid) == pid
    assert len(list(batches)) == 19


SCRIPT = """
import os, sys, time, torch
sys.path[:0] = {path!r}
from test_data_workers import Processes, loader, pids
batches = iter(loader(Processes(hangs=2)))
print(*pids(next(batches)), flush=True)
{then}
"""


@linux_only
@pytest.mark.parametrize("then", ["time.sleep(60)", "pass"])
def test_workers_die_with_their_trainer(then: str) -> None:
    """Killed, or at the end of its program with the iteration still open. The workers are stuck and never look up."""
    script = SCRIPT.format(path=[*sys.path, os.path.dirname(__file__)], then=then)
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    try:
        workers = [int(word) for word in trainer.stdout.readline().split()]
        assert len(workers) == 2
        if "sleep" in then:
            trainer.kill()
        trainer.wait(timeout=20)
    finally:
        trainer.kill()
        trainer.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(exists, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(exists, workers))


def test_many_tensors_arrive_whole() -> None:
    class Rows(Processes):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.full((3,), index), "pid": 0}

    rows = [m.tensors["x"] for batch in loader(Rows()) for m in batch.micro_batches]
    assert torch.equal(torch.cat(rows), torch.arange(40)[:, None].expand(40, 3))
