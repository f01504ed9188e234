"""torch's elastic agent over our own processes. The only file of the launcher that imports torch."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trimaran.world.agent_processes import POLL_SECONDS, WorkerProcesses


def run_agent(processes: WorkerProcesses) -> None:
    """Supervise `processes` until all have ended or, one having failed, the others were stopped."""
    Agent(processes).run()


class Agent(SimpleElasticAgent):
    """The four things an agent does to workers, on `WorkerProcesses`; torch's part is the loop and the restarts."""

    def __init__(self, processes: WorkerProcesses) -> None:
        super().__init__(
            WorkerSpec(
                role="worker",
                local_world_size=processes.num_procs,
                entrypoint=processes.command[0],
                rdzv_handler=_OneNode(),
                max_restarts=0,
                monitor_interval=POLL_SECONDS,
            )
        )
        self._processes = processes

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if worker_group.state != WorkerState.INIT:  # a restart; the first start came before the agent
            self._processes.start()
        return dict(self._processes.pids)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._processes.stop()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._processes.poll()
        if self._processes.have_failed:
            return RunResult(state=WorkerState.FAILED)
        if self._processes.have_ended:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._processes.pids))
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: int = 0, timeout: int = 0) -> None:
        self._processes.kill()

    def _construct_event(self, state: str, source: Any, *args: Any, **kwargs: Any) -> Event:
        # torch's own looks this host's full name up in the network each time, for a record that nobody reads.
        return Event(state, source)


class _OneNode(RendezvousHandler):
    """A meeting of one agent: needs no network, only a store to write ranks into."""

    def get_backend(self) -> str:
        return "one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "one-node"

    def shutdown(self) -> bool:
        return True
