"""Where a run begins: at the start, from its own last checkpoint, or from another run's state or weights."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

from trimaran.checkpoint import (
    Checkpoint,
    Lineage,
    StateNames,
    discard_leftovers,
    find_candidates,
    find_checkpoint,
    list_steps,
    open_checkpoint,
    restore_model,
    split_step,
)
from trimaran.engine import Engine
from trimaran.errors import CheckpointError, RunError
from trimaran.job import Job
from trimaran.records import CHECKPOINTS_FOLDER, METRICS_FILE, RUN_FILE, read_run
from trimaran.run.agree import on_first_rank
from trimaran.run.directory import RunDirectory, find_differences
from trimaran.world.groups import World

Way = Literal["new", "again", "resumed", "forked", "from"]


@dataclass(frozen=True)
class Source:
    """Another run to begin from, as the user named it: `text` is RUN or RUN@step."""

    way: Literal["forked", "from"]
    text: str

    @property
    def run(self) -> Path:
        return split_step(self.text)[0]

    @property
    def step(self) -> int | None:
        return split_step(self.text)[1]

    def is_that_of(self, origin: Mapping[str, Any]) -> bool:
        """Whether this is what a run was started with, however its path is spelled."""
        theirs = Source(origin["way"], origin["text"])
        same_run = self.run.resolve() == theirs.run.resolve()
        return (self.way, self.step) == (theirs.way, theirs.step) and (same_run or self.text == theirs.text)

    @property
    def flag(self) -> str:
        """What the user wrote, or would write: "--fork runs/a@30"."""
        return f"{'--fork' if self.way == 'forked' else '--from'} {self.text}"


@dataclass(frozen=True)
class Beginning:
    """How this start begins. `run_id` and `epoch` name its owner; `checkpoint` is what it begins from, if anything."""

    way: Way
    run_id: str
    epoch: int
    checkpoint: Checkpoint | None = None
    passed_over: Sequence[str] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps that are behind it."""
        return self.checkpoint.step if self.checkpoint is not None and self.way != "from" else 0

    @property
    def position(self) -> int:
        """Samples that are behind it."""
        return self.checkpoint.state.position if self.checkpoint is not None and self.way != "from" else 0

    def describe(self, total_steps: int) -> str:
        """A few words for the head: "continues after step 30"."""
        if self.way == "resumed":
            is_over = self.step >= total_steps
            return f"finished before, at step {self.step}" if is_over else f"continues after step {self.step}"
        if self.way == "again":
            return "started before, and never saved: begins again"
        return f"new, {self.origin['flag']}" if self.origin else "new"

    def lines(self) -> list[str]:
        """What was passed over and what was changed, a line each."""
        lines = [f"passed   {reason}" for reason in self.passed_over]
        if self.checkpoint is not None:
            lines.insert(0, f"begins   from {self.checkpoint.folder}")
        changed = self.origin.get("changed", {}) if self.way == "forked" else {}
        return lines + [f"changed  {name}: {theirs} → {ours}" for name, (theirs, ours) in changed.items()]


def find_beginning(
    world: World,
    directory: RunDirectory | None,
    path: Path,
    name: str,
    identity: Mapping[str, Any],
    source: Source | None,
) -> Beginning:
    """Decides how the run at `path`, of the job `name`, begins. Every rank must call it; `directory` is rank 0's.

    A run that was started here continues from its newest checkpoint that counts and is whole, whose bytes the ranks
    verify together. Raises RunError for another job's run, for checkpoints of which none can be used, and for a
    `source` that has none.
    """
    told = on_first_rank(world, partial(_look, directory, path, name, identity, source))
    seen = _Seen(**json.loads(world.gather_text(json.dumps(asdict(told) if told else None))[0]))
    begins = Beginning(seen.way, seen.run_id, seen.epoch, origin=seen.origin)
    if seen.way == "new":
        return begins
    lineage = Lineage(seen.source_id, {int(epoch): step for epoch, step in seen.resumed.items()})
    found, refused = find_checkpoint(
        Path(seen.source), lineage, seen.steps, share=(world.rank, world.size), agree=partial(_first_fault, world)
    )
    if found is None and (refused or seen.way != "resumed"):
        raise _nothing_to_begin_from(seen, refused)
    if found is None:
        return replace(begins, way="again")
    # Of a source without a step, the newest by now: a start that was killed before it saved begins there again.
    origin = {**seen.origin, "step": found.step} if seen.way != "resumed" else seen.origin
    return replace(begins, checkpoint=found, passed_over=refused, origin=origin)


def restore(beginning: Beginning, engine: Engine, names: StateNames) -> None:
    """Puts the checkpoint's state, or with --from its weights alone, into the engine. Every rank must call it."""
    if beginning.checkpoint is None:
        return
    state = beginning.checkpoint.state
    with open_checkpoint(beginning.checkpoint.folder, beginning.checkpoint.manifest) as reader:
        if beginning.way == "from":
            restore_model(engine.model, reader, dealt=engine.dealt)
            return
        _check_trained(engine.model, state.trained)
        names.restore(reader, state.model, state.optimizer)
    engine.num_updates = state.num_updates
    if engine.loss_scale is not None and state.loss_scale is not None:
        engine.loss_scale.value = float(state.loss_scale["value"])
        engine.loss_scale.good_steps = int(state.loss_scale["good_steps"])


def take_over(directory: RunDirectory, beginning: Beginning) -> list[str]:
    """Makes the run's records end where it begins, and clears what killed saves left. On rank 0, before step 1.

    Returns what there is to say of it: what was cleared, and how many steps that are behind it are not in its records,
    because they were removed or the disk lost them.
    """
    num_recorded = directory.take_over(beginning.step)
    folder = directory.path / CHECKPOINTS_FOLDER
    cleared = discard_leftovers(folder) if folder.is_dir() else []
    lines = [f"cleared  {name}, which was never whole or half deleted" for name in cleared]
    is_fork = beginning.origin.get("way") == "forked"
    num_made = beginning.step - (beginning.origin["step"] if is_fork else 0)
    if num_recorded == num_made:
        return lines
    return [*lines, f"records  {METRICS_FILE} holds {num_recorded} of the {num_made} steps that are behind this run"]


@dataclass(frozen=True)
class Course:
    """The job with the steps that a run takes in all, and where its samples lie in the one order.

    Step k, from 0, takes the positions from k · global_batch + `shift` on; `total_samples` are counted without the
    shift, which is not 0 only where a fork changed the global batch: what is behind it was counted in other batches.
    """

    job: Job
    shift: int
    total_samples: int

    def position_after(self, step: int) -> int:
        """Samples that are behind the run after so many steps."""
        return min(step * self.job.global_batch, self.total_samples) + self.shift


def plot_course(job: Job, beginning: Beginning, engine: Engine) -> Course:
    """The way that is left from a beginning. A length in epochs becomes the steps that its samples still take.

    The engine's schedule follows. Raises RunError for a fork that has no step left.
    """
    shift = beginning.position - beginning.step * job.global_batch
    course = Course(job, shift, job.total_samples)
    if shift and job.steps is None:
        total_samples = max(job.total_samples - shift, beginning.step * job.global_batch)
        num_steps = -(-total_samples // job.global_batch)
        job = job.with_overrides(steps=num_steps, seed=None, global_batch=None)
        course = Course(job, shift, total_samples)
        engine.lr_factor = job.schedule.resolve(total_steps=num_steps, steps_per_epoch=job.steps_per_epoch)
    if beginning.way == "forked" and beginning.step >= job.total_steps:
        raise RunError(
            f"{beginning.origin['flag']} begins after step {beginning.step}, and the job has {job.total_steps}.",
            "A fork goes on with the count of steps of the run it begins from.",
            "Give more --steps (or epochs), or fork from an earlier step.",
        )
    return course


@dataclass(frozen=True)
class _Seen:
    """What rank 0 found in the directories, told to all."""

    way: Way
    run_id: str
    epoch: int
    origin: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    source_id: str = ""
    resumed: Mapping[str, int] = field(default_factory=dict)
    steps: Sequence[int] = ()


def _look(
    directory: RunDirectory | None, path: Path, name: str, identity: Mapping[str, Any], source: Source | None
) -> _Seen:
    assert directory is not None
    started = directory.read_started(identity, name)
    if started is not None:
        _check_source(path, started.origin, source)
        lineage = Lineage.read(path)
        resumed = {str(epoch): step for epoch, step in lineage.resumed.items()}
        way: Way = "resumed"
        steps, origin = list_steps(path), dict(started.origin)
        # A fork or copy that was killed before it first saved begins from its source again.
        if not origin or steps:
            return _Seen(way, started.id, directory.epoch, origin, str(path), started.id, resumed, steps)
        source = source or Source(origin["way"], origin["text"])
        if origin["step"] not in list_steps(source.run):
            raise RunError(
                f"{path} has not saved yet, and began from step {origin['step']} of {source.run}, which is no more.",
                "A run that is killed before it saves begins again where it began.",
                "Give another --run to begin from a checkpoint that is there.",
            )
        return _from_source(directory, identity, source, run_id=started.id, step=origin["step"])
    if source is None:
        return _Seen("new", secrets.token_hex(8), directory.epoch)
    return _from_source(directory, identity, source, run_id=secrets.token_hex(8), step=source.step)


def _from_source(
    directory: RunDirectory, identity: Mapping[str, Any], source: Source, *, run_id: str, step: int | None
) -> _Seen:
    if source.run.resolve() == directory.path.resolve():
        raise RunError(
            f"{source.flag} names the run's own directory.",
            "A fork is a new run, beside the one it begins from.",
            "Give it another --run.",
        )
    lineage, steps = find_candidates(source.run, step, said=f"{source.flag}: ")
    there = read_run(source.run / RUN_FILE)
    changed = {name: [theirs, ours] for name, theirs, ours in find_differences(there.identity, identity)}
    _check_parameters(source, changed)
    origin = {
        "way": source.way,
        "text": source.text,
        "flag": source.flag,
        "run": str(source.run),
        "run_id": there.id,
        "step": step,
        "changed": changed,
    }
    return _Seen(
        source.way,
        run_id,
        directory.epoch,
        origin,
        str(source.run),
        there.id,
        {str(epoch): step for epoch, step in lineage.resumed.items()},
        steps,
    )


def _check_parameters(source: Source, changed: Mapping[str, Sequence[Any]]) -> None:
    """Raises RunError where the other run's model has other parameters than this job's."""
    names = [name for name in changed if name.startswith("parameters.")]
    if not names:
        return
    theirs, ours = (f"of shape {each}" if each else "not there" for each in changed[names[0]])
    name = names[0].removeprefix("parameters.")
    others = f", and {len(names) - 1} more differ" if names[1:] else ""
    raise RunError(
        f"{source.flag}: parameter {name} is {theirs}; in this job it is {ours}{others}.",
        "A run begins from one of the same model.",
        "Give the model its arguments of then, or take what fits: Job(weights=tm.Weights(..., partial=True)).",
    )


def _check_trained(model: nn.Module, trained: Sequence[str]) -> None:
    """Raises CheckpointError where other parameters were trained: the optimizer's state is that of those."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (name in trained):
            was, now = ("frozen", "trained") if parameter.requires_grad else ("trained", "frozen")
            raise CheckpointError(
                f"{name} was {was} when the checkpoint was saved, and is {now} in this job.",
                "A run's whole state has the optimizer's for the parameters that were trained.",
                "Train the same ones, or take the weights alone: --from.",
            )


def _check_source(path: Path, origin: Mapping[str, Any], source: Source | None) -> None:
    if source is None or (origin and source.is_that_of(origin)):
        return
    before = f"with {origin['flag']}" if origin else "anew"
    raise RunError(
        f"{path} was started {before}; this command has {source.flag}.",
        "A run has one beginning, and then continues from its own checkpoints.",
        "Leave it out to continue the run, or give another --run.",
    )


def _first_fault(world: World, fault: str) -> str:
    return next((each for each in world.gather_text(fault) if each), "")


def _nothing_to_begin_from(seen: _Seen, refused: Sequence[str]) -> RunError:
    reasons = " ".join(refused) if refused else "it has none."
    if seen.way == "resumed":
        return RunError(
            f"no checkpoint of {seen.source} can be used: {reasons}",
            "A run that has saved continues from a checkpoint, and never from the start unasked.",
            f"Start a new run (another --run), or remove {Path(seen.source) / CHECKPOINTS_FOLDER} to begin again.",
        )
    return RunError(
        f"{seen.origin['flag']}: no checkpoint of {seen.source} can be used: {reasons}",
        "It begins from a checkpoint that is whole.",
        "Name another step or another run.",
    )
