"""An owner that lost its run to another, and goes on writing: nothing of what it does counts (invariant 11)."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trimaran as tm
import trimaran.run.assemble as assemble
from resuming import NEVER, Case, assert_same_run, build_job, train
from tiny_job import events_of
from trimaran.batch import RankBatch
from trimaran.checkpoint import Lineage, NamedState, Owner, Saver, StateNames, find_checkpoint, list_steps
from trimaran.errors import CheckpointError, RunError, TrimaranError
from trimaran.layout import Layout
from trimaran.phases import WRITE_POINTS, Moment, Phases
from trimaran.records import CHECKPOINTS_FOLDER, StateRecord
from trimaran.run import Run
from trimaran.world.groups import open_world

CASE = Case("sgd", steps=8)


class Hold:
    """Holds the first save of step 4 at a write point until it is released, as a suspended process would."""

    def __init__(self, point: str) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self._point = point

    def __call__(self, moment: Moment) -> None:
        if (moment.point, moment.step) == (self._point, 4) and not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(60)


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """Two runs in one process set their signal handlers in no order."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hold], None]:
    """Lets a Hold see the phases of the runs that are started from here on."""

    def watch(hold: Hold) -> None:
        def build(**options: Any) -> Phases:
            return Phases(observers=[*options.get("observers", ()), hold])

        monkeypatch.setattr(assemble, "Phases", build)

    return watch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(build_job(CASE), run=run, options=CASE.options(NEVER))
    return run


def lose_lock(running: Run) -> None:
    """As a file system does whose locks are lost with a connection."""
    assert running._directory is not None
    fcntl.flock(running._directory._lock, fcntl.LOCK_UN)


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_an_orphan_in_the_middle_of_a_save(
    tmp_path: Path, undisturbed: Path, watched: Callable[[Hold], None], point: str
) -> None:
    hold = Hold(point)
    watched(hold)
    options = tm.RunOptions(save_every="2steps", keep_last=1 if point == "save:during-deletion" else "all")
    orphan = tm.start(build_job(CASE), run=tmp_path / "a", options=options)
    batches = iter(orphan)
    for batch in batches:
        orphan.step(batch)
        if batch.index == 3:
            break
    late = next(batches)  # the step's edge, where the save of step 4 began
    assert hold.reached.wait(60)
    lose_lock(orphan)
    train(build_job(CASE), run=tmp_path / "a", options=options)
    resumed = 4 if point in ("save:after-rename", "save:during-deletion") else 2
    assert ("resumed", resumed) in events_of(tmp_path / "a")
    save_in_progress = tmp_path / "a" / CHECKPOINTS_FOLDER / "step-00000010.tmp-2"
    save_in_progress.mkdir()
    (save_in_progress / "rank-00000-of-00001.safetensors").write_bytes(b"not yet whole")
    files = contents(tmp_path / "a")

    hold.released.set()
    # In the middle of a deletion nothing is left to be refused: what it had begun to delete is gone already.
    with nullcontext() if point == "save:during-deletion" else pytest.raises(TrimaranError):
        orphan._saving._saver.wait()
    orphan.step(late)
    with pytest.raises(RunError, match="taken over by another start"):
        go_on(orphan, batches)
    with pytest.raises(RunError, match="taken over"), orphan:
        raise KeyError("the loop's own")
    assert contents(tmp_path / "a") == files
    assert_same_run(tmp_path / "a", undisturbed)


def go_on(running: Run, batches: Iterable[RankBatch]) -> None:
    for batch in batches:
        running.step(batch)


def contents(run: Path) -> dict[str, bytes]:
    """Every file of a run directory."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_an_orphan_that_is_faster_than_its_refusal(tmp_path: Path) -> None:
    """It looked just before it was replaced, and commits after that: a step beyond, and one that is there already."""
    folder = tmp_path / CHECKPOINTS_FOLDER
    folder.mkdir()
    orphan, owner = (OneSaver(folder, epoch) for epoch in (1, 2))
    for step in (2, 4):
        owner.save(step)
    orphan.save(6)
    with pytest.raises(CheckpointError, match="was written by owner 2 of the run; this process is owner 1"):
        orphan.save(4)
    # Owner 2 had gone on from step 1, where it found owner 1's last.
    found, refused = find_checkpoint(tmp_path, Lineage("run", {2: 1}), list_steps(tmp_path))
    assert found is not None
    assert (found.step, found.manifest.epoch) == (4, 2)
    assert len(refused) == 1
    assert "owner 1 wrote it, and owner 2 had gone on from step 1" in refused[0]
    owner.save(6)  # whatever the orphan left there
    found, refused = find_checkpoint(tmp_path, Lineage("run", {2: 1}), list_steps(tmp_path))
    assert found is not None
    assert (found.step, found.manifest.epoch, refused) == (6, 2, [])


class OneSaver:
    """Saves a tiny model as one owner of a run, who is never told that it was replaced."""

    def __init__(self, folder: Path, epoch: int) -> None:
        model = nn.Linear(2, 2)
        self._names = StateNames(model, torch.optim.SGD(model.parameters(), lr=0.1))
        world = open_world(None, Layout().resolve(world_size=1, global_batch=1), device="cpu")
        self._saver = Saver(folder, world=world, phases=Phases(), owner=Owner("run", epoch, lambda: None))

    def save(self, step: int) -> None:
        def describe(state: NamedState) -> StateRecord:
            return StateRecord(step, step, step, None, state.optimizer, state.model, (), "", "")

        self._saver.save(self._names.collect, describe)
        self._saver.wait()
