"""Loading through torch's DataLoader, with workers that end when they should and never earlier."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from trimaran.errors import DataError

Item = TypeVar("Item")

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 1.0


def load(
    dataset: Dataset[Item], requests: Iterable[Any], *, num_workers: int, pin_memory: bool
) -> Generator[Item, None, None]:
    """Yield `dataset[request]` for each request, in order, loaded ahead by `num_workers` processes (0: by this one).

    Closing the generator, or dropping it, ends the workers. Raises DataError naming a worker that was killed.
    """
    loader = DataLoader(
        dataset,
        sampler=requests,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=functools.partial(_start_worker, os.getpid()),
        # Forked workers need not pickle the source. They touch neither the accelerator nor the process group.
        multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
        # Otherwise torch draws its workers' seeds from the process's own generator.
        generator=torch.Generator(),
    )
    items = _start(loader)
    # torch has no public name for them.
    workers: Sequence[BaseProcess] = items._workers if num_workers else ()
    end_workers = functools.partial(_end, workers)
    atexit.register(end_workers)
    try:
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                if (death := _find_death(workers)) is not None:
                    raise death from error
                raise
            yield item
    finally:
        # Dropping the iterator asks the workers to end and waits, long, for each that is stuck in a sample.
        with _killed_after(_GRACE_SECONDS, workers):
            del items
        end_workers()
        atexit.unregister(end_workers)


def _start(loader: DataLoader[Item]) -> Any:
    """Start iterating, and keep torch from raising out of a signal handler, at any line, when a worker dies.

    torch notices a dead worker by itself, within 5 s, when it waits for that worker's item.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    items = iter(loader)
    if before is not None:  # None: a handler that Python did not set, and cannot set again.
        signal.signal(signal.SIGCHLD, before)
    return items


def _start_worker(parent_pid: int, worker_id: int) -> None:
    """Let this worker outlive signals meant for the trainer, which saves first, and die with the trainer itself.

    On Linux it dies with the thread that started it, at once. Elsewhere torch's worker looks for its parent every 5 s.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


@contextmanager
def _killed_after(seconds: float, workers: Sequence[BaseProcess]) -> Iterator[None]:
    """Kill the workers that live longer than this into the block."""
    if not any(worker.is_alive() for worker in workers):
        yield
        return
    timer = threading.Timer(seconds, _kill, [workers])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _end(workers: Sequence[BaseProcess]) -> None:
    _kill(workers)
    for worker in workers:
        worker.join()


def _find_death(workers: Sequence[BaseProcess]) -> DataError | None:
    """The error that names the dead workers, where torch, or a broken connection to them, only says that it failed."""
    # A dying worker's connections close a moment before it can be seen to be dead.
    ended = connection.wait([worker.sentinel for worker in workers], timeout=_GRACE_SECONDS)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join(_GRACE_SECONDS)
    dead = [f"{worker.pid} ({_cause(worker.exitcode)})" for worker in workers if worker.exitcode not in (None, 0)]
    if not dead:
        return None
    return DataError(
        f"Loader worker {', '.join(dead)} of process {os.getpid()} died while loading a sample.",
        "A worker that is killed takes its samples with it. SIGKILL mostly means that the memory was full.",
        "Use fewer workers (--num-workers), smaller samples, or more memory.",
    )


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"


def _as_it_is(item: Item) -> Item:
    return item
