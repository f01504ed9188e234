"""The processes of a run: their groups, the mesh over them, and the few collectives the rest of the code calls."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimaran.errors import UsageError
from trimaran.layout import ResolvedLayout
from trimaran.options import Device
from trimaran.world.device import choose_device
from trimaran.world.environment import WorkerEnvironment
from trimaran.world.place import AXES, Place, place_of

Mesh = DeviceMesh
"""What the other floors call it: they are handed meshes, and make none."""

# Ranks finish writing at different times. A rank that is dead ends the wait at once, by its closed connection.
_SAVING_TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True)
class World:
    """One rank's view of all processes of a run.

    `mesh` has the axes pp, dp, tp over `device`'s backend and `agreement` is a CPU group over all ranks, used for
    decisions and counts; both are None where there is one process, and every collective is then the identity.
    """

    rank: int
    size: int
    local_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    place: Place
    mesh: DeviceMesh | None
    agreement: dist.ProcessGroup | None
    saving: dist.ProcessGroup | None
    """A CPU group over all ranks for a background thread that saves; its waits are long, as writing may be."""
    shards: DeviceMesh | None = None
    """The data ranks where they shard: the axis "shard", before it "replicate" where there are several groups."""

    @property
    def leads_data_rank(self) -> bool:
        """Whether this is the first of the ranks that see the same samples, the one that counts them."""
        return self.place.tp == 0 and self.place.pp == 0

    def ranks_beside(self, axes: frozenset[str]) -> tuple[int, ...]:
        """The ranks of this pipeline stage, this one among them, that have its coordinates on `axes`; in order.

        With no axes: all of the stage, which hold the same of what is not cut.
        """
        if self.mesh is None:
            return (self.rank,)
        _, dp, tp = (self.mesh[axis].size() for axis in AXES)
        shard = self.shards["shard"].size() if self.shards is not None else 1
        places = ((rank, place_of(rank, dp=dp, tp=tp, shard=shard)) for rank in range(self.size))
        same = axes | {"pp"}
        return tuple(
            rank for rank, place in places if all(getattr(place, axis) == getattr(self.place, axis) for axis in same)
        )

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on `axis` alone; None where the axis has one rank."""
        if self.mesh is None or self.mesh[axis].size() == 1:
            return None
        return self.mesh.get_group(axis)

    def agree(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a CPU tensor in place over all ranks, and waits. Every rank must call it."""
        if self.agreement is not None:
            dist.all_reduce(values, op=op, group=self.agreement)
        return values

    def agree_later(self, values: Tensor) -> dist.Work | None:
        """Starts the sum of a CPU tensor over all ranks, in place; wait on what it returns before reading.

        Every rank must call it, in the same order among the agreements.
        """
        if self.agreement is None:
            return None
        work: dist.Work | None = dist.all_reduce(values, group=self.agreement, async_op=True)
        return work

    def gather_text(self, text: str, *, group: dist.ProcessGroup | None = None) -> list[str]:
        """Every rank's text, by rank, on every rank. Every rank must call it; costs two small collectives.

        Over `group`, one of all ranks, where the agreement's is not free: on another thread.
        """
        group = group or self.agreement
        if group is None:
            return [text]
        data = (
            torch.frombuffer(bytearray(text.encode(errors="surrogateescape")), dtype=torch.uint8)
            if text
            else torch.empty(0).byte()
        )
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=group)
        texts = [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]
        return [each.decode(errors="surrogateescape") for each in texts]  # a path may hold any bytes

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.agree(torch.zeros(1))


def open_world(
    environment: WorkerEnvironment | None, layout: ResolvedLayout, *, device: Device, timeout_seconds: float = 600.0
) -> World:
    """Joins this process to the others of the run; every rank must call it. `layout` must be resolved.

    Started alone (`environment` None), there are no groups. Raises ClusterError for a device that is not here, and
    UsageError where the others cannot be met.
    """
    num_procs = environment.world_size if environment else 1
    rank = environment.rank if environment else 0
    local_rank = environment.local_rank if environment else 0
    chosen = choose_device(device, local_rank=local_rank, num_procs=num_procs)
    backend = "none"
    mesh, agreement, saving = None, None, None
    if environment is not None and num_procs > 1:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        _meet(environment, backend, chosen, timeout_seconds)
        mesh = _build_mesh(layout, chosen)
        agreement = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        saving = dist.new_group(backend="gloo", timeout=_SAVING_TIMEOUT)
    world = World(
        rank=rank,
        size=num_procs,
        local_rank=local_rank,
        num_nodes=environment.num_nodes if environment else 1,
        device=chosen,
        backend=backend,
        place=place_of(rank, dp=layout.dp, tp=layout.tp, shard=layout.shard or 1),
        mesh=mesh,
        agreement=agreement,
        saving=saving,
        shards=_build_shards(layout, mesh),
    )
    _wait_until_connected(world)
    return world


def close_world() -> None:
    """Leaves the groups, if any were joined. Every rank should call it before it ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join_default_group(layout: ResolvedLayout, device: torch.device) -> World:
    """The world of a process that has already joined torch's default group, as in a caller's own script."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = _build_mesh(layout, device)
    world = World(
        rank=rank,
        size=size,
        local_rank=rank,
        num_nodes=1,
        device=device,
        backend=dist.get_backend(),
        place=place_of(rank, dp=layout.dp, tp=layout.tp, shard=layout.shard or 1),
        mesh=mesh,
        agreement=dist.new_group(backend="gloo"),
        saving=dist.new_group(backend="gloo", timeout=_SAVING_TIMEOUT),
        shards=_build_shards(layout, mesh),
    )
    _wait_until_connected(world)
    return world


def _build_mesh(layout: ResolvedLayout, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=AXES)


def _build_shards(layout: ResolvedLayout, mesh: DeviceMesh | None) -> DeviceMesh | None:
    if mesh is None or layout.shard is None:
        return None
    split = mesh._unflatten("dp", (layout.dp // layout.shard, layout.shard), ("replicate", "shard"))
    return split["shard"] if layout.shard == layout.dp else split["replicate", "shard"]


def _wait_until_connected(world: World) -> None:
    """Keeps a rank that leaves at once from closing connections that slower ones are still making.

    gloo returns from making a group when this rank's own connections stand; a peer that is still at its own then fails
    with "Connection closed by peer".
    """
    world.barrier()


def _meet(environment: WorkerEnvironment, backend: str, device: torch.device, timeout_seconds: float) -> None:
    if _is_loopback(environment.master_addr):
        # Without this gloo asks the resolver for this host's name, which may lead off the machine or nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        store = _own_store(environment, timeout_seconds)
        dist.init_process_group(
            backend,
            init_method=None if store else f"tcp://{environment.master_addr}:{environment.master_port}",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistStoreError as problem:
        raise UsageError(
            f"rank {environment.rank} did not meet the others at {environment.master_addr}:{environment.master_port}: "
            f"{problem}.",
            "All ranks of a run meet at one address, which rank 0 opens.",
            "Check that every process was started, that the address is reachable, and that the port is free.",
        ) from problem


def _own_store(environment: WorkerEnvironment, timeout_seconds: float) -> TCPStore | None:
    """The store under our own launcher, which has opened its socket for rank 0; None where torch makes its own."""
    if environment.launcher != "trimaran":
        return None
    return TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=environment.rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=environment.store_fd,
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False
