"""The worker processes of one node: started, signalled, watched and ended. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trimaran.errors import UsageError
from trimaran.world.agent_failures import WorkerEnd, read_failure
from trimaran.world.environment import ERROR_FILE, PARENT_PIPE, STORE_FD

POLL_SECONDS = 0.05
_LOOPBACK = "127.0.0.1"
_SETTLE_SECONDS = 2.0
_KILL_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    sent: set[int] = field(default_factory=set)
    end: WorkerEnd | None = None

    def send_once(self, number: int) -> None:
        if self.process.poll() is None and number not in self.sent:
            self.sent.add(number)
            self.process.send_signal(number)


class WorkerProcesses:
    """`num_procs` copies of `command`, each in a session of its own.

    `requests` takes SIGINT and SIGTERM as they arrive, from a signal handler; `poll` passes each kind on to every
    worker exactly once, and kills all of them at the second SIGINT. Each SIGUSR1 in `save_requests` is passed on too.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_procs: int,
        port: int | None,
        threads_per_worker: int | None,
        grace_seconds: float,
        directory: Path,
    ) -> None:
        self.command = list(command)
        self.num_procs = num_procs
        self.requests: list[int] = []
        self.save_requests: list[int] = []
        self._port = port
        self._threads_per_worker = threads_per_worker
        self._grace_seconds = grace_seconds
        self._directory = directory
        self._workers: list[_Worker] = []
        self._stopping = False
        self._seen_seconds = 0.0
        self._lifeline = os.pipe()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank; empty before `start`."""
        return {worker.rank: worker.process.pid for worker in self._workers}

    @property
    def ends(self) -> list[WorkerEnd]:
        """How each worker ended that has, in the order of ranks."""
        return [worker.end for worker in self._workers if worker.end is not None]

    @property
    def have_ended(self) -> bool:
        """Whether no worker is left."""
        return len(self.ends) == len(self._workers)

    @property
    def have_failed(self) -> bool:
        """Whether the others should be stopped for the sake of one that failed.

        After an error of ours, which often strikes all ranks alike, the others get a moment to report the same.
        """
        failures = [end for end in self.ends if end.is_failure]
        if not failures or self.have_ended:
            return bool(failures)
        settled = time.time() - min(end.time_seconds for end in failures) > _SETTLE_SECONDS
        return settled or any(end.failure is None or not end.failure.is_ours for end in failures)

    def start(self) -> None:
        """Start all workers. Raises UsageError when the port is taken."""
        self._seen_seconds = time.time()
        self._stopping = False
        self._workers = []
        with _listen(self._port) as listener:
            for rank in range(self.num_procs):
                self._workers.append(self._start_one(rank, listener))

    def poll(self) -> None:
        """Pass requested signals on, and note which workers have ended."""
        seen_seconds = time.time()
        if self.requests.count(signal.SIGINT) > 1:
            self.kill()
        num_saves = len(self.save_requests)
        for worker in self._workers:
            if num_saves and worker.process.poll() is None:
                worker.process.send_signal(signal.SIGUSR1)
            for number in dict.fromkeys(self.requests):
                worker.send_once(number)
            exit_code = worker.process.poll()
            if exit_code is not None and worker.end is None:
                worker.end = self._end_of(worker, exit_code)
        del self.save_requests[:num_saves]
        self._seen_seconds = seen_seconds

    def wait(self, seconds: float) -> bool:
        """Poll until all workers have ended or one has failed; False when `seconds` pass before that."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if self.have_ended or self.have_failed:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def stop(self) -> None:
        """End the workers that still run: SIGTERM, then SIGKILL after the grace period."""
        self.poll()
        self._stopping = True
        for worker in self._workers:
            worker.send_once(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_seconds
        while not self.have_ended and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self.poll()
        self.kill()

    def kill(self) -> None:
        """End every process of every worker that still runs, at once."""
        self._stopping = True
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.sent.add(signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.end = worker.end or self._end_of(worker, _killed_exit_code(worker.process))

    def close(self) -> None:
        """Kill what still runs and give back what was opened."""
        self.kill()
        for descriptor in self._lifeline:
            os.close(descriptor)

    def _start_one(self, rank: int, listener: socket.socket) -> _Worker:
        error_file = self._directory / f"rank{rank}.json"
        error_file.unlink(missing_ok=True)
        environ = self._environ_of(rank, listener.getsockname()[1]) | {
            ERROR_FILE: str(error_file),
            PARENT_PIPE: str(self._lifeline[0]),
        }
        descriptors = [self._lifeline[0]]
        if rank == 0:
            environ[STORE_FD] = str(listener.fileno())
            descriptors.append(listener.fileno())
        process = subprocess.Popen(
            self.command,
            env=environ,
            stdin=subprocess.DEVNULL,
            # A session of its own: the terminal's Ctrl-C reaches the launcher only, which passes it on once.
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=_dies_with_parent(),
        )
        return _Worker(rank, process, error_file)

    def _environ_of(self, rank: int, port: int) -> dict[str, str]:
        """torchrun's variables, and threads that fit the machine."""
        world = str(self.num_procs)
        threads = self._threads_per_worker or max(1, _num_cores() // self.num_procs)
        share = {"OMP_NUM_THREADS": str(threads)}
        asked = share if self._threads_per_worker else {}
        return {
            **share,
            **os.environ,
            **asked,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port)},
            # Rank 0 serves the store: one kept by the launcher would hand stale addresses to restarted workers.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }

    def _end_of(self, worker: _Worker, exit_code: int) -> WorkerEnd:
        told = -exit_code in worker.sent or exit_code - 128 in worker.sent
        return WorkerEnd(
            rank=worker.rank,
            pid=worker.process.pid,
            exit_code=exit_code,
            time_seconds=self._seen_seconds,
            stopped=told or (self._stopping and bool(worker.sent) and exit_code >= 0),
            failure=read_failure(worker.error_file),
        )


def _listen(port: int | None) -> socket.socket:
    """A socket that listens on loopback, handed to rank 0: nothing can take the port in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK, port or 0))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise UsageError(
            f"port={port} {reason}.",
            f"The workers of a run meet at a port of their own on {_LOOPBACK}.",
            "Give another one, or none: then a free one is found.",
        ) from None
    return listener


def _killed_exit_code(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:  # stuck in the kernel, which ends it as soon as it lets go
        return -signal.SIGKILL


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _dies_with_parent() -> Callable[[], None] | None:
    """What a worker does before its program begins so that kill -9 of the launcher ends it too (Linux)."""
    if sys.platform != "linux":
        return None  # there `watch_parent` does it
    return partial(_set_parent_death_signal, ctypes.CDLL(None).prctl, os.getpid())


def _set_parent_death_signal(prctl: Callable[[int, int], int], parent_pid: int) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save would end a worker that does not train yet
    if os.getppid() != parent_pid:  # the launcher died before it was asked for
        os.kill(os.getpid(), signal.SIGKILL)
