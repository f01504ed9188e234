"""Starting the workers of one machine and standing above them until the last has ended."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from trimaran.errors import UsageError
from trimaran.world.agent_failures import STOPPED_AFTER_SAVING, explain
from trimaran.world.agent_processes import WorkerProcesses

_START_UP_SECONDS = 5.0


def start_workers(
    command: Sequence[str],
    *,
    num_procs: int,
    port: int | None = None,
    threads_per_worker: int | None = None,
    grace_seconds: float = 3.0,
) -> int:
    """Run `num_procs` copies of `command` as one world on this machine, and return the exit code when all have ended.

    Each copy finds torchrun's variables (read them with `discover`), OMP_NUM_THREADS set to its share of the cores
    unless the user set it or `threads_per_worker` is given, and a place for `record_failure`. They meet on loopback,
    at `port` or a free one, whose listening socket rank 0 inherits (`WorkerEnvironment.store_fd`).

    Returns 0 when all finished, 75 when all stopped on request after saving, 130 after a second Ctrl-C, and 128 plus
    the signal when one that was passed on ended workers before they could save. Raises WorkerError, naming the first
    cause in time, when a worker failed; the others then got SIGTERM and, `grace_seconds` later, SIGKILL. An error
    of ours that all ranks report alike is raised as it is. Raises UsageError for a taken port.

    SIGINT and SIGTERM are passed on to the workers once and waited for; a second SIGINT kills them. SIGUSR1, a request
    to save, is passed on each time. Workers die with
    this process, even when it is killed. Call from the main thread, in the process that the user started.

    What is used of torch.distributed.elastic is the agent (`SimpleElasticAgent`): its loop and its restarts, with
    none allowed so far. Processes are our own, because torch's wait a fixed 30 s for survivors, take exit 75 for a
    failure, outlive a killed agent, and print the cause once per rank. The agent joins after the start-up: importing
    torch here would take a core from the workers that import it at the same time (1.3 s later on two cores), and a
    run that fails in its first seconds is not one to restart.
    """
    if num_procs < 1:
        raise UsageError(f"procs={num_procs}.", "It counts worker processes.", "Give 1 or more.")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimaran-")))
        processes = WorkerProcesses(
            command,
            num_procs=num_procs,
            port=port,
            threads_per_worker=threads_per_worker,
            grace_seconds=grace_seconds,
            directory=directory,
        )
        stack.callback(processes.close)
        stack.enter_context(_recorded_signals(processes))
        _supervise(processes)
    return _conclude(processes)


def _supervise(processes: WorkerProcesses) -> None:
    processes.start()
    if not processes.wait(_START_UP_SECONDS):
        from trimaran.world.agent_elastic import run_agent

        run_agent(processes)
    processes.stop()


def _conclude(processes: WorkerProcesses) -> int:
    ends, requests = processes.ends, processes.requests
    if requests.count(signal.SIGINT) > 1:
        return 128 + signal.SIGINT
    error = explain(ends)
    if error is not None:
        raise error
    if any(end.stopped for end in ends) and requests:
        return 128 + requests[0]
    return STOPPED_AFTER_SAVING if ends[0].exit_code == STOPPED_AFTER_SAVING else 0


@contextmanager
def _recorded_signals(processes: WorkerProcesses) -> Iterator[None]:
    """Append SIGINT, SIGTERM and SIGUSR1 to lists of requests instead of dying of them.

    The first two stay ignored where they are, as under nohup; SIGUSR1 is ignored by our own doing until it is heard.
    """

    def record(number: int, frame: FrameType | None) -> None:
        (processes.save_requests if number == signal.SIGUSR1 else processes.requests).append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    heard = [each for each in numbers if each == signal.SIGUSR1 or signal.getsignal(each) != signal.SIG_IGN]
    previous = {number: signal.signal(number, record) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
