"""Saving: every rank's parts under a temporary name, then the manifest, then one rename that makes it a checkpoint.

Before the rename nothing exists; after it, everything. With several ranks the work behind `save` runs on a thread with
a process group of its own, while training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trimaran.checkpoint.disk import TEMPORARY, discard, make_folder, sync_folder, write_text
from trimaran.checkpoint.parts import Part, parts_to_write
from trimaran.checkpoint.shard_file import DTYPE_NAMES, Entry, write_shard
from trimaran.checkpoint.staging import Staging
from trimaran.checkpoint.state import NamedState
from trimaran.errors import CheckpointError, RunError, TrimaranError
from trimaran.phases import Phases
from trimaran.records import (
    MANIFEST_FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    PartRecord,
    StateRecord,
    TensorRecord,
    find_gap,
    name_checkpoint,
    read_manifest,
    to_text,
)
from trimaran.units import format_bytes
from trimaran.world.device import available_host_bytes
from trimaran.world.groups import World

_FILE_BYTES, _MOST_FILES, _MOST_WRITERS = 2**26, 16, 2
"""A rank writes its parts into files of this size, or into so many larger ones: a SHA-256 is made and checked by one
thread for each file."""
_MOST_STAGED = 0.9
"""Of the host memory that is free: training needs some too."""


@dataclass(frozen=True)
class Owner:
    """Who writes: the run, and the number of its present owner; `confirm` raises where that is no longer this one."""

    run_id: str
    epoch: int
    confirm: Callable[[], None]
    """Called on rank 0 before the commit, on the thread that saves; also flushes the run's own records."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on disk. `stall_seconds` is how long training waited for it."""

    step: int
    folder: Path
    num_bytes: int
    stall_seconds: float
    write_seconds: float


class Saver:
    """Saves a run's state into `folder`, one checkpoint at a time. Every rank has one and calls the same methods.

    `tidy` runs on rank 0 after each commit, with its step, on the same thread, and may delete older checkpoints.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        phases: Phases,
        owner: Owner,
        tidy: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folder = folder
        self._world = world
        self._phases = phases
        self._owner = owner
        self._tidy = tidy
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._finished: list[Saved] = []
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a save is still being written on this rank."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether a save failed in the background and nobody was told yet."""
        return self._error is not None

    def save(
        self,
        collect: Callable[[], NamedState],
        describe: Callable[[NamedState], StateRecord],
        *,
        blocking: bool = False,
    ) -> str:
        """Saves what `collect` gives, in the background unless `blocking`. Every rank must call it.

        Waits for an earlier save first. Returns a word of warning where it could not be in the background, for want
        of host memory; else "". Raises CheckpointError on every rank for what any rank cannot save, and for an
        earlier save's failure.
        """
        began = time.perf_counter()
        self.wait()
        state, parts, fault = NamedState(), [], None
        try:
            state = collect()
            parts = parts_to_write(state.tensors, self._world, state.orders)
            for part in parts:
                _check_dtype(part)
        except TrimaranError as problem:
            fault = problem
        need = 0 if blocking else self._staging.missing_bytes(parts)
        lacking = self._agree_to_start(fault, need)
        record = describe(state)
        staged = [part.local for part in parts] if blocking or lacking else self._staging.copy(parts)
        # What is copied needs no more of the model; what is not must not change until it is written.
        job = _Save(
            folder=self._folder,
            world=self._world,
            phases=self._phases,
            owner=self._owner,
            tidy=self._tidy,
            state=state,
            record=record,
            parts=parts,
            tensors=staged,
        )
        stalled = time.perf_counter() - began
        if blocking or lacking:
            self._run(job, stalled, is_stalling=True)
            self.wait()
        else:
            self._thread = threading.Thread(target=self._run, args=(job, stalled), name="save", daemon=True)
            self._thread.start()
        return lacking

    def take_finished(self) -> list[Saved]:
        """The saves that were committed since the last call; does not wait."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits for a save in progress. Raises CheckpointError where it failed, on every rank for the same reason."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                return
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _agree_to_start(self, fault: TrimaranError | None, need: int) -> str:
        """Raises a rank's fault on every rank; else why the save cannot be staged on some host, or ""."""
        told = [fault.value, fault.rule, fault.remedy] if fault is not None else None
        words = self._world.gather_text(json.dumps([told, socket.gethostname(), need, available_host_bytes()]))
        of_ranks = [json.loads(each) for each in words]
        for rank, (theirs, *_) in enumerate(of_ranks):
            if theirs is not None:
                value, rule, remedy = theirs
                raise CheckpointError(f"rank {rank}: {value}" if self._world.size > 1 else value, rule, remedy)
        for host in {each[1] for each in of_ranks}:
            wanted = sum(each[2] for each in of_ranks if each[1] == host)
            available = min(each[3] for each in of_ranks if each[1] == host)
            if wanted > _MOST_STAGED * available:
                return (
                    f"a copy to save from needs {format_bytes(wanted)} of host memory on {host}, where "
                    f"{format_bytes(available)} are free: training waits until the checkpoint is written"
                )
        return ""

    def _run(self, job: _Save, stalled: float, *, is_stalling: bool = False) -> None:
        began = time.perf_counter()
        try:
            num_bytes = job.run()
            took = time.perf_counter() - began
            folder = self._folder / name_checkpoint(job.record.step)
            stalled += took if is_stalling else 0.0
            self._finished.append(Saved(job.record.step, folder, num_bytes, stalled, took))
        except BaseException as error:
            self._error = error


@dataclass(frozen=True)
class _Save:
    """One save on one rank, after its tensors are safe from change."""

    folder: Path
    world: World
    phases: Phases
    owner: Owner
    tidy: Callable[[int], None]
    state: NamedState
    record: StateRecord
    parts: Sequence[Part]
    tensors: Sequence[Tensor]

    def run(self) -> int:
        """Writes this rank's file and, on rank 0, commits. Returns the checkpoint's bytes. All ranks fail alike."""
        written: list[dict[str, Any]] = []
        fault = None
        try:
            written = self._write_parts()
            self._reach("save:before-manifest")
        except Exception as problem:
            fault = self._describe(problem)
        told = json.dumps({"fault": fault, "written": written, "values": self._values()})
        of_ranks = [json.loads(each) for each in self.world.gather_text(told, group=self.world.saving)]
        outcome: list[Any] = [[], 0]
        if self.world.rank == 0:
            faults = [(rank, each["fault"]) for rank, each in enumerate(of_ranks) if each["fault"]]
            outcome = self._finish(of_ranks, faults)
        refusal, num_bytes = json.loads(self.world.gather_text(json.dumps(outcome), group=self.world.saving)[0])
        if refusal:
            raise CheckpointError(*refusal)
        return int(num_bytes)

    def _finish(self, of_ranks: Sequence[Mapping[str, Any]], faults: Sequence[tuple[int, list[str]]]) -> list[Any]:
        """Commits on rank 0: (why not, bytes)."""
        try:
            if faults:
                rank, (value, rule, remedy) = faults[0]
                raise CheckpointError(f"rank {rank}: {value}" if self.world.size > 1 else value, rule, remedy)
            num_bytes = self._commit(of_ranks)
        except Exception as problem:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return [self._describe(problem), 0]
        try:
            self.tidy(self.record.step)
        except Exception as problem:
            return [self._describe(problem, "is saved, and an older checkpoint cannot be deleted"), num_bytes]
        return [[], num_bytes]

    @property
    def _target(self) -> Path:
        return self.folder / name_checkpoint(self.record.step)

    @property
    def _temporary(self) -> Path:
        # The owner's number is in it: an owner that was replaced writes beside the new one, never into its files.
        return self.folder / f"{name_checkpoint(self.record.step)}{TEMPORARY}{self.owner.epoch}"

    def _write_parts(self) -> list[dict[str, Any]]:
        """Writes this rank's files; returns what each of them holds."""
        self._reach("save:before-directory")
        make_folder(self.folder)
        make_folder(self._temporary)
        shares = share_out([part.local.nbytes for part in self.parts])
        with ThreadPoolExecutor(_MOST_WRITERS) as threads:
            return list(threads.map(self._write_file, range(len(shares)), shares))

    def _write_file(self, number: int, share: range) -> dict[str, Any]:
        name = f"rank-{self.world.rank:05d}-of-{self.world.size:05d}{f'-{number:03d}' if number else ''}.safetensors"
        parts = self.parts[share.start : share.stop]
        record = write_shard(
            self._temporary / name,
            [_entry(part) for part in parts],
            (tensor.cpu() for tensor in self.tensors[share.start : share.stop]),
            halfway=lambda: self._reach("save:mid-shard", self._temporary / name),
            before_flush=lambda: self._reach("save:before-flush", self._temporary / name),
        )
        held = [
            [
                part.name,
                DTYPE_NAMES[part.local.dtype],
                part.shape,
                part.is_complex,
                part.key,
                part.offset,
                [*part.local.shape],
            ]
            for part in parts
        ]
        return {"file": name, "bytes": record.num_bytes, "sha256": record.sha256, "parts": held}

    def _values(self) -> dict[str, Any] | None:
        """What a pipeline stage keeps besides tensors; the first of the ranks that hold it says it."""
        if self.world.rank != self.world.ranks_beside(frozenset())[0]:
            return None
        return {
            "aliases": self.state.aliases,
            "model": self.record.model,
            "optimizer": self.record.optimizer,
            "trained": self.record.trained,
        }

    def _commit(self, of_ranks: Sequence[Mapping[str, Any]]) -> int:
        files, tensors = self._gather_parts(of_ranks)
        values = [each["values"] for each in of_ranks if each["values"] is not None]
        record = _merge(self.record, values)
        files[STATE_FILE] = write_text(self._temporary / STATE_FILE, to_text(record))
        manifest = Manifest(
            run_id=self.owner.run_id,
            epoch=self.owner.epoch,
            step=record.step,
            files=files,
            tensors=tensors,
            aliases={name: first for each in values for name, first in each["aliases"].items()},
        )
        write_text(self._temporary / MANIFEST_FILE, to_text(manifest))
        self._reach("save:after-manifest")
        sync_folder(self._temporary)
        self._reach("save:before-rename")
        # Asked at the last moment: who slept until now and was replaced meanwhile must not touch what the new one has.
        self.owner.confirm()
        if os.path.lexists(self._target):
            self._clear_target()
        self._temporary.rename(self._target)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)  # which may have this folder since this save
        self._reach("save:after-rename", self._target)
        return sum(each.num_bytes for each in files.values())

    def _gather_parts(
        self, of_ranks: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
        """Files and tensors of the manifest. Raises CheckpointError where a file or a part is not there."""
        files: dict[str, FileRecord] = {}
        tensors: dict[str, TensorRecord] = {}
        for rank, written in ((rank, file) for rank, each in enumerate(of_ranks) for file in each["written"]):
            name = written["file"]
            files[name] = FileRecord(written["bytes"], written["sha256"])
            if not (self._temporary / name).is_file() or (self._temporary / name).stat().st_size != written["bytes"]:
                raise CheckpointError(
                    f"rank 0 does not see the file that rank {rank} wrote: {self._temporary / name}.",
                    "A run's directory is on a file system that all nodes share.",
                    "Give --run a path on a shared disk.",
                )
            for tensor, dtype, shape, is_complex, key, offset, part_shape in written["parts"]:
                part = PartRecord(name, key, tuple(offset), tuple(part_shape))
                known = tensors.get(tensor)
                parts = (*known.parts, part) if known else (part,)
                tensors[tensor] = TensorRecord(dtype, tuple(shape), parts, is_complex)
        for name, record in tensors.items():
            if (gap := find_gap(record)) is not None:  # cut in a way that `parts` does not understand
                raise CheckpointError(
                    f"{name} as saved by {len(of_ranks)} ranks: {gap}.",
                    "A checkpoint holds each number of a tensor once, or it is none.",
                    "Please report this, with the layout and how the model is cut.",
                )
        return files, tensors

    def _clear_target(self) -> None:
        """Deletes what stands in the way: passed over as damaged, or left by an owner that this one replaced."""
        with contextlib.suppress(CheckpointError):
            there = read_manifest(self._target)
            if there.run_id == self.owner.run_id and there.epoch > self.owner.epoch:
                raise RunError(
                    f"{self._target} was written by owner {there.epoch} of the run; this process is owner "
                    f"{self.owner.epoch}.",
                    "A run has one writer.",
                    "Let the newer one go on; this one ends here.",
                )
        discard(self._target, epoch=self.owner.epoch)

    def _reach(self, point: Any, path: Path | None = None) -> None:
        self.phases.reach(point, step=self.record.step, path=path or self._temporary)

    def _describe(self, problem: Exception, fate: str = "cannot be written") -> list[str]:
        if isinstance(problem, TrimaranError):
            return [problem.value, problem.rule, problem.remedy]
        if isinstance(problem, OSError):
            what, remedy = problem.strerror or problem, "Make room on that disk or make it writable"
        else:
            what, remedy = f"{type(problem).__name__}: {problem}", "Look into it"
        return [
            f"{self._target} {fate}: {what}.",
            "A checkpoint is written whole or not at all, and a run that cannot save is not worth its price.",
            f"{remedy}, and start again: the run continues from its last checkpoint.",
        ]


def share_out(sizes: Sequence[int]) -> list[range]:
    """Which parts of these sizes go into one file: those that follow each other, so that files are about alike."""
    total = sum(sizes)
    count = min(_MOST_FILES, -(-total // _FILE_BYTES)) or 1
    shares: dict[int, range] = {}
    begun = 0
    for index, size in enumerate(sizes):
        file = min(count - 1, begun * count // total) if total else 0
        shares[file] = range(shares[file].start if file in shares else index, index + 1)
        begun += size
    return list(shares.values())


def _entry(part: Part) -> Entry:
    return Entry(part.key, DTYPE_NAMES[part.local.dtype], tuple(part.local.shape), part.local.nbytes)


def _check_dtype(part: Part) -> None:
    if part.local.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{part.name} is a tensor of {part.local.dtype}.",
            f"A checkpoint holds {', '.join(str(each).removeprefix('torch.') for each in DTYPE_NAMES)}.",
            "Keep it in one of these.",
        )


def _merge(record: StateRecord, of_stages: Sequence[Mapping[str, Any]]) -> StateRecord:
    """One record of what the pipeline stages keep besides tensors, each for its own parameters."""
    if len(of_stages) == 1:
        return record
    optimizers = [each["optimizer"] for each in of_stages]
    merged = {
        "kind": optimizers[0]["kind"],
        "parameters": {name: each for one in optimizers for name, each in one["parameters"].items()},
        "shared": {name: each for one in optimizers for name, each in one["shared"].items()},
        "groups": [group for one in optimizers for group in one["groups"]],
    }
    model = {name: value for each in of_stages for name, value in each["model"].items()}
    trained = tuple(name for each in of_stages for name in each["trained"])
    return replace(record, optimizer=merged, model=model, trained=trained)
