"""How this process was started: the variables that launchers write, read here and nowhere else."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from trimaran.errors import UsageError
from trimaran.world.agent_failures import write_failure

ERROR_FILE = "TRIMARAN_ERROR_FILE"
"""Set by our own launcher: where a worker writes why it failed."""
STORE_FD = "TRIMARAN_STORE_FD"
"""Set by our own launcher for rank 0: a listening socket on the master's port, for the store's server."""
PARENT_PIPE = "TRIMARAN_PARENT_PIPE"
"""Set by our own launcher: the reading end of a pipe that closes when the launcher dies."""

_TORCHRUN_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0  # batch scripts and interactive shells carry step ids from here on
_SLURM_PORTS = range(10_000, 30_000)  # below what kernels hand out to outgoing connections


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """This process's place among all that were started with it; ranks count from 0.

    The workers meet at `master_addr`:`master_port`. `store_fd`, on rank 0 under our own launcher, is the
    descriptor of a socket that already listens there (for `TCPStore(master_listen_fd=...)`).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    launcher: Literal["torchrun", "slurm", "trimaran"]
    store_fd: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            self._contradiction(f"rank {self.rank} of a world of {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            self._contradiction(f"local rank {self.local_rank} among {self.local_world_size} on this node")
        if self.local_world_size > self.world_size:
            self._contradiction(f"{self.local_world_size} workers on this node of a world of {self.world_size}")
        if not 0 <= self.node_rank < self.num_nodes:
            self._contradiction(f"node {self.node_rank} of {self.num_nodes}")
        if not 1 <= self.master_port <= 65535:
            self._contradiction(f"port {self.master_port}, outside 1 to 65535")

    def _contradiction(self, what: str) -> NoReturn:
        names = "SLURM_*" if self.launcher == "slurm" else ", ".join(_TORCHRUN_RANKS + _TORCHRUN_MASTER)
        raise UsageError(
            f"The launcher's variables contradict each other: {what}.",
            "Ranks count from 0 to one less than their number, and all workers share one port of the master.",
            f"Correct or unset {names}, or leave them to torchrun, srun or --procs.",
        )


def discover(environ: Mapping[str, str] = os.environ) -> WorkerEnvironment | None:
    """This process's place as its launcher described it, or None when it was started alone.

    Reads torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, where
    set, GROUP_RANK and GROUP_WORLD_SIZE); otherwise, in an srun step of more than one task, Slurm's. MASTER_ADDR and
    MASTER_PORT alone say where workers would meet, not that there are any: they start nothing, but replace the
    address and port derived from Slurm's. Raises UsageError when variables are missing or contradict each other.
    """
    if any(name in environ for name in _TORCHRUN_RANKS):
        return _from_torchrun(environ)
    if _is_slurm_step(environ):
        return _from_slurm(environ)
    return None


def _from_torchrun(environ: Mapping[str, str]) -> WorkerEnvironment:
    missing = [name for name in _TORCHRUN_RANKS + _TORCHRUN_MASTER if name not in environ]
    if missing:
        present = [name for name in _TORCHRUN_RANKS + _TORCHRUN_MASTER if name in environ]
        raise UsageError(
            f"{', '.join(present)} set, but not {', '.join(missing)}.",
            "A worker needs all of them to find the others.",
            f"Start with torchrun or --procs, which set them all, or unset {', '.join(present)} to run alone.",
        )
    rank, local_world_size = _integer(environ, "RANK"), _integer(environ, "LOCAL_WORLD_SIZE")
    world_size = _integer(environ, "WORLD_SIZE")
    # Launchers other than torchrun leave the node out; then every node is taken to hold as many workers as this one.
    local = max(1, local_world_size)
    return WorkerEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_integer(environ, "GROUP_RANK", rank // local),
        num_nodes=_integer(environ, "GROUP_WORLD_SIZE", -(-world_size // local)),
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
        launcher="trimaran" if ERROR_FILE in environ else "torchrun",
        store_fd=_integer(environ, STORE_FD) if STORE_FD in environ else None,
    )


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_STEP_ID" not in environ or "SLURM_NTASKS" not in environ:
        return False
    return _integer(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_SLURM_STEP and _integer(environ, "SLURM_NTASKS") > 1


def _from_slurm(environ: Mapping[str, str]) -> WorkerEnvironment:
    node_rank = _integer(environ, "SLURM_NODEID")
    nodes = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    tasks_per_node = _expand_counts(_first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if not 0 <= node_rank < len(tasks_per_node):
        raise UsageError(
            f"SLURM_NODEID={node_rank}, but Slurm lists tasks for {len(tasks_per_node)} nodes.",
            "A task runs on one of its step's nodes.",
            "Start with srun, and leave the SLURM_* variables as it sets them.",
        )
    job_and_step = _integer(environ, "SLURM_JOB_ID") + 7919 * _integer(environ, "SLURM_STEP_ID")
    return WorkerEnvironment(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, "SLURM_NTASKS"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        local_world_size=tasks_per_node[node_rank],
        node_rank=node_rank,
        num_nodes=len(tasks_per_node),
        master_addr=environ.get("MASTER_ADDR") or _first_host(nodes),
        # Steps of one job may run side by side on one node: neighbours get different ports.
        master_port=_integer(environ, "MASTER_PORT", _SLURM_PORTS[job_and_step % len(_SLURM_PORTS)]),
        launcher="slurm",
    )


def _first_set(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise UsageError(
        f"SLURM_STEP_ID is set, but not {' or '.join(names)}.",
        "A task of a Slurm step needs it to find the others.",
        "Start with srun, and leave the SLURM_* variables as it sets them.",
    )


def _first_host(node_list: str) -> str:
    """The first name in Slurm's notation: "gpu[003-006,9],login1" gives gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else node_list)


def _expand_counts(counts: str) -> list[int]:
    """One number per node from Slurm's notation: "4(x2),3" gives 4, 4, 3."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, repeat in found for _ in range(int(repeat or 1))]


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d+", text.strip()):
        raise UsageError(
            f"{name} is not set." if text is None else f"{name}={text!r} is not a count.",
            "The launcher describes each worker in whole numbers from 0.",
            f"Correct {name}, or start with torchrun, srun or --procs, which set it.",
        )
    return int(text)


def record_failure(error: BaseException, environ: Mapping[str, str] = os.environ) -> bool:
    """Leave the reason of this worker's end to the launcher, which prints it once for all ranks; True when it will.

    Call it on an error that nothing has caught, then exit. False means that no launcher of ours listens (started
    alone, by torchrun or by srun): the caller prints the error itself. Never raises.
    """
    if ERROR_FILE not in environ:
        return False
    return write_failure(Path(environ[ERROR_FILE]), error)


def watch_parent(environ: Mapping[str, str] = os.environ) -> None:
    """End this process, at once and unsaved, when the launcher that started it dies.

    Call it first in a worker. Linux needs no help: there the kernel was told when the worker was started. Elsewhere
    a thread waits at a pipe whose other end only the launcher holds.
    """
    if PARENT_PIPE not in environ or sys.platform == "linux":
        return
    threading.Thread(target=_die_at_end_of_file, args=(int(environ[PARENT_PIPE]),), daemon=True).start()


def _die_at_end_of_file(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: this returns when the other end closes
    os.kill(os.getpid(), signal.SIGKILL)
