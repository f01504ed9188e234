"""One model and its AdamW state, saved and loaded by Trimaran and by torch.distributed.checkpoint as it comes."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from trimaran.checkpoint import (
    Lineage,
    NamedState,
    Owner,
    Saver,
    StateNames,
    find_checkpoint,
    list_steps,
    open_checkpoint,
)
from trimaran.layout import Layout
from trimaran.phases import Phases
from trimaran.records import StateRecord
from trimaran.world.groups import World, join_default_group, open_world

OURS = "trimaran"
SIDES = (OURS, "DCP files", "DCP safetensors")
WIDTH = 1024
BYTES_PER_LAYER = 3 * 4 * WIDTH * (WIDTH + 1)
"""A weight and a bias in float32, and two moments of each."""

Wait = Callable[[], None]


@dataclass(frozen=True)
class Cell:
    """How many processes hold (the same) state, and how much of it in all."""

    num_procs: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_procs} proc{'s' if self.num_procs > 1 else ''} {self.num_bytes / 2**20:.0f} MiB"


class State:
    """The model and the optimizer after a step; all processes hold the same, as data-parallel ones do."""

    def __init__(self, cell: Cell, rank: int, store: str) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // cell.num_procs))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=cell.num_procs)
        layout = Layout().resolve(world_size=cell.num_procs, global_batch=cell.num_procs)
        cpu = torch.device("cpu")
        self.world: World = (
            join_default_group(layout, cpu) if cell.num_procs > 1 else open_world(None, layout, device="cpu")
        )
        torch.manual_seed(0)
        layers = max(1, cell.num_bytes // BYTES_PER_LAYER)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.names = StateNames(self.model, self.optimizer)
        for each in self.model.parameters():
            each.grad = torch.randn_like(each)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """All of it under flat names; these are the tensors in use."""
        return self.names.collect().tensors

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors().values())

    def digest(self) -> list[float]:
        """Numbers that tell another state."""
        return [float(each.double().sum()) for each in self.tensors().values()]

    def erase(self) -> None:
        """Puts zeros in place of everything."""
        with torch.no_grad():
            for each in self.tensors().values():
                each.zero_()


class Side(ABC):
    """Saves one state under a folder and loads it from there; every rank calls the same methods."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder

    @abstractmethod
    def save(self) -> None:
        """Returns when it is on disk."""

    @abstractmethod
    def begin(self) -> Wait:
        """Returns when training may go on; what it returns waits until it is on disk."""

    @abstractmethod
    def load(self) -> None:
        """Puts the last saved state in place of the present one."""

    @property
    def saved(self) -> Path:
        """Where it lies."""
        return self.folder

    def clear(self) -> None:
        """Deletes what was saved; on rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


class Trimaran(Side):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state, folder)
        self._step = 0
        self._saver = Saver(
            folder / "checkpoints", world=state.world, phases=Phases(), owner=Owner("benchmark", 1, lambda: None)
        )

    def save(self) -> None:
        self._step += 1
        self._saver.save(self.state.names.collect, self._describe, blocking=True)

    def begin(self) -> Wait:
        self._step += 1
        if warning := self._saver.save(self.state.names.collect, self._describe):
            raise MemoryError(warning)
        return self._saver.wait

    def load(self) -> None:
        world = self.state.world
        found, refused = find_checkpoint(
            self.folder,
            Lineage("benchmark", {}),
            list_steps(self.folder),
            share=(world.rank, world.size),
            agree=lambda fault: next((each for each in world.gather_text(fault) if each), ""),
        )
        assert found is not None, refused
        with open_checkpoint(found.folder, found.manifest) as reader:
            self.state.names.restore(reader, found.state.model, found.state.optimizer)

    def _describe(self, state: NamedState) -> StateRecord:
        return StateRecord(self._step, 0, 0, None, state.optimizer, state.model, (), "", "")


class Dcp(Side):
    """`torch.distributed.checkpoint` with its own defaults; no digest is made or checked."""

    def __init__(self, state: State, folder: Path, *, safetensors: bool) -> None:
        super().__init__(state, folder)
        self._safetensors = safetensors

    def save(self) -> None:
        dcp.save(dict(self.state.tensors()), storage_writer=self._writer())

    def begin(self) -> Wait:
        future = dcp.async_save(dict(self.state.tensors()), storage_writer=self._writer())
        assert isinstance(future, Future)

        def wait() -> None:
            future.result()

        return wait

    def load(self) -> None:
        reader = dcp.HuggingFaceStorageReader if self._safetensors else dcp.FileSystemReader
        dcp.load(dict(self.state.tensors()), storage_reader=reader(str(self.folder)))

    def _writer(self) -> dcp.StorageWriter:
        if self._safetensors:
            return dcp.HuggingFaceStorageWriter(str(self.folder), save_distributed=True)
        return dcp.FileSystemWriter(str(self.folder))


def build_side(name: str, state: State, folder: Path) -> Side:
    """One of SIDES."""
    if name == OURS:
        return Trimaran(state, folder)
    return Dcp(state, folder, safetensors=name == "DCP safetensors")
