"""A pool of gloo workers that stay alive between tests: a test on two ranks costs some 50 ms, not an import of torch.

    def both(value: int) -> float: ...            # a top-level function of the test module

    def test_sum(pool): assert pool.run(both, 2, 3) == [6.0, 6.0]

A server process imports torch once and forks the workers, so that one can be replaced within milliseconds: those
that took part in a run in which any rank raised, died or hung are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_WORKERS = 8
# The second, which the first step of any optimizer imports, takes a second; so does the last.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.device_mesh", "numpy", "pytest", "trimaran.run"]


class RankDied(Exception):
    """A worker ended without an answer."""


class RankHung(Exception):
    """A worker gave no answer in time, and was killed."""


@dataclass(frozen=True)
class Outcome:
    """What one rank returned or raised."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    time_seconds: float = 0.0


@dataclass(frozen=True)
class _Call:
    module: str
    file: str
    function: str
    arguments: bytes
    sys_path: list[str]
    rank: int
    world_size: int
    store: str
    group_timeout: timedelta


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection


class Pool:
    """Runs functions on ranks 0 to world_size - 1 of a gloo world of exactly that size."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._directory = tempfile.TemporaryDirectory(prefix="pool-")
        self._workers: list[_Worker] = []
        self._num_runs = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that wait, by the rank they take."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """What `fn(*args, **kwargs)` returned on each rank; there is no process group where `world_size` is 1.

        The first exception in time is raised again here, with its rank and remote traceback in a note.
        """
        outcomes = self._run(fn, world_size, args, kwargs, timeout, patience=5.0)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            first = min(failed, key=lambda outcome: outcome.time_seconds)
            assert first.error is not None
            raise first.error
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Outcome]:
        """As `run`, for ranks that are meant to fail: each rank's value or exception, RankDied and RankHung too."""
        return self._run(fn, world_size, args, kwargs, timeout, patience=timeout)

    def close(self) -> None:
        """End all workers; none may be left."""
        processes = [worker.process for worker in self._workers]
        for worker in self._workers:
            worker.connection.close()
        for process in processes:
            process.join(5)
        left = [process.pid for process in processes if process.is_alive()]
        for process in processes:
            process.kill()
        self._workers = []
        self._directory.cleanup()
        assert not left, f"pool workers {left} did not end"

    def _run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        patience: float,
    ) -> list[Outcome]:
        self._grow(world_size)
        workers = self._workers[:world_size]
        self._num_runs += 1
        store = Path(self._directory.name, f"store{self._num_runs}")
        for rank, worker in enumerate(workers):
            worker.connection.send(_describe(fn, args, kwargs, rank, world_size, store, timeout))
        outcomes = _collect(workers, timeout, patience)
        store.unlink(missing_ok=True)
        if any(outcome.error is not None for outcome in outcomes):
            self._replace(workers)
        return outcomes

    def _grow(self, count: int) -> None:
        assert 1 <= count <= MAX_WORKERS, f"the pool has 1 to {MAX_WORKERS} ranks, not {count}"
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _replace(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join(10)
        self._workers = [worker for worker in self._workers if worker not in workers]


def stop_server() -> None:
    """End the server that forks workers, once all pools are closed: it lives as long as any worker does."""
    # Private, but the only way to see them gone before this process ends.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # torch takes a second to leave by itself
    server._stop()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _describe(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    world_size: int,
    store: Path,
    timeout: float,
) -> _Call:
    assert "." not in fn.__qualname__, f"{fn.__qualname__} must be a top-level function of its module"
    return _Call(
        module=fn.__module__,
        file=fn.__code__.co_filename,
        function=fn.__qualname__,
        arguments=pickle.dumps((args, kwargs)),
        sys_path=list(sys.path),
        rank=rank,
        world_size=world_size,
        store=str(store),
        # A collective that waits for an absent rank gives up before the worker is killed, and says where it waited.
        group_timeout=timedelta(seconds=0.75 * timeout),
    )


def _collect(workers: list[_Worker], timeout: float, patience: float) -> list[Outcome]:
    """One outcome per rank; after a first failure the others get `patience` seconds."""
    deadline = time.monotonic() + timeout
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Outcome] = {}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting), remaining):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            outcomes[rank] = _receive(workers[rank], rank)
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + patience)
    for rank in waiting.values():
        hung = RankHung(f"rank {rank} (pid {workers[rank].process.pid}) gave no answer within {timeout:g} s")
        outcomes[rank] = Outcome(rank, error=hung, time_seconds=time.monotonic())
    return [outcomes[rank] for rank in range(len(workers))]


def _receive(worker: _Worker, rank: int) -> Outcome:
    try:
        outcome = pickle.loads(worker.connection.recv_bytes())
        assert isinstance(outcome, Outcome)
        return outcome
    except (EOFError, ConnectionError):
        worker.process.join(5)
        died = RankDied(f"rank {rank} (pid {worker.process.pid}) ended with exit code {worker.process.exitcode}")
        # What it set off in others was noticed before this pipe was read: it comes first.
        return Outcome(rank, error=died, time_seconds=0.0)


# ── In the workers ──────────────────────────────────────────────────────────────────────────────────────────────────


def _serve(connection: Connection) -> None:
    """Answer calls until the pool closes its end of the pipe."""
    import torch

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pool
    torch.set_num_threads(1)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send_bytes(_answer(call))


def _answer(call: _Call) -> bytes:
    import torch.distributed as dist

    try:
        _join_group(call)
        function = getattr(_module_of(call), call.function)
        args, kwargs = pickle.loads(call.arguments)
        answer = pickle.dumps(Outcome(call.rank, function(*args, **kwargs)))
    except BaseException as error:
        answer = _pack_error(call.rank, error)
    # Only now: ranks that still wait fail when this one leaves the group, which must come second in time.
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    return answer


def _forget_meshes() -> None:
    """Lets no later call meet a mesh of this one: equal meshes are one to DTensor's cache, and its groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch._C import _clear_DTensor_sharding_propagator_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _clear_DTensor_sharding_propagator_cache()


def _join_group(call: _Call) -> None:
    import torch.distributed as dist

    if call.world_size > 1:
        store = dist.FileStore(call.store, call.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=call.group_timeout
        )
        dist.barrier()  # a rank that leaves at once would close connections that slower ones are still making


def _pack_error(rank: int, error: BaseException) -> bytes:
    now = time.monotonic()
    remote = f"On rank {rank} (pid {os.getpid()}):\n{''.join(traceback.format_exception(error)).rstrip()}"
    for candidate in (error, RuntimeError(f"{type(error).__name__}: {error}")):
        candidate.add_note(remote)
        try:
            packed = pickle.dumps(Outcome(rank, error=candidate, time_seconds=now))
            pickle.loads(packed)
            return packed
        except Exception:
            continue  # an exception whose constructor takes other arguments does not survive the trip
    raise AssertionError("a RuntimeError can be pickled")


def _module_of(call: _Call) -> Any:
    """The test's module, imported from its file: pytest knows it by a name that sys.path may not lead to."""
    sys.path += [entry for entry in call.sys_path if entry not in sys.path]
    if call.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    return sys.modules[call.module]
