"""When a run saves, and what is said of it: one `Saver` and the clock, steps, figures and requests that move it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trimaran.checkpoint import (
    Keeper,
    Lineage,
    NamedState,
    Owner,
    Retention,
    Saved,
    Saver,
    StateNames,
    checkpoint_folder,
    describe_hugging_face,
)
from trimaran.engine import Engine
from trimaran.errors import UsageError
from trimaran.job import Job
from trimaran.options import RunOptions
from trimaran.phases import Phases
from trimaran.records import CHECKPOINTS_FOLDER, METRICS_FILE, StateRecord, read_steps
from trimaran.run.console import Console
from trimaran.run.decide import Decision, StopRequest
from trimaran.run.directory import RunDirectory
from trimaran.run.resume import Beginning, Course
from trimaran.units import Duration, format_bytes, format_seconds
from trimaran.world.groups import World

FIRST_SAVE_STEP = 20
"""Of a run that has not saved before: a saving that fails should fail early, and not after ten minutes."""
REQUEST_FILE = "save"
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class SaveTimes:
    """When a run saves by itself: every so many seconds, every so many steps, or both; never where both are None."""

    seconds: float | None
    steps: int | None

    @classmethod
    def of(cls, options: RunOptions, job: Job) -> SaveTimes:
        """The options' `save_every` for a job, whose epochs have a length."""
        seconds = next((each.seconds for each in options.save_intervals if each.seconds is not None), None)
        spans = [each for each in options.save_intervals if each.seconds is None]
        return cls(seconds, _in_steps(job, spans[0]) if spans else None)


def retention_of(options: RunOptions, job: Job) -> Retention:
    """What the options keep."""
    kept = options.kept_interval
    last = None if options.keep_last == "all" else options.keep_last
    return Retention(last, None if kept is None else _in_steps(job, kept), options.best_figure)


class Saving:
    """Decides at each step's edge whether to save, saves, and tells of it. Every rank calls the same methods."""

    def __init__(
        self,
        *,
        course: Course,
        options: RunOptions,
        layout: str,
        world: World,
        engine: Engine,
        names: StateNames,
        path: Path,
        directory: RunDirectory | None,
        console: Console,
        phases: Phases,
        beginning: Beginning,
        request: StopRequest,
    ) -> None:
        job = course.job
        _check_best(options, job)
        self._course = course
        self._layout = layout
        self._engine = engine
        self._names = names
        self._path = path
        self._directory = directory
        self._console = console
        self._phases = phases
        self._request = request
        self._times = SaveTimes.of(options, job)
        self._kept_steps = retention_of(options, job).every
        self._never = self._times.seconds is None and self._times.steps is None and self._kept_steps is None
        self._best = options.best_figure
        self._best_value: float | None = None
        if self._best is not None and directory is not None:
            self._best_value = _best_so_far(directory.path / METRICS_FILE, *self._best)
        if self._best is not None:
            told = world.gather_text("" if self._best_value is None else repr(self._best_value))[0]
            self._best_value = float(told) if told else None
        self._first_step = beginning.step
        self._saved_step = beginning.step
        self._saved_any = beginning.way == "resumed"
        self._is_best = False
        self._saved_at = time.monotonic()
        self._looked_at = 0.0
        self._has_warned = False
        confirm = directory.confirm if directory is not None else _nothing
        tidy: Callable[[int], None] = lambda step: None  # noqa: E731
        if directory is not None:
            keeper = Keeper(
                path,
                Lineage.read(directory.path),
                retention_of(options, job),
                epoch=directory.epoch,
                confirm=directory.confirm,
            )
            tidy = partial(self._tidy, keeper)
        self._saver = Saver(
            path / CHECKPOINTS_FOLDER,
            world=world,
            phases=phases,
            owner=Owner(beginning.run_id, beginning.epoch, confirm),
            tidy=tidy,
        )

    @property
    def wants_save(self) -> bool:
        """Whether this rank asks all to save at the next edge: by the clock or a file, on rank 0, or by a signal."""
        wants, self._request.wants_save = self._request.wants_save, False
        if self._directory is None:
            return wants
        now = time.monotonic()
        if self._times.seconds is not None and now - self._saved_at >= self._times.seconds:
            return True
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            file = self._path / REQUEST_FILE
            if file.is_file():
                file.unlink(missing_ok=True)
                return True
        return wants

    @property
    def has_failed(self) -> bool:
        """Whether a save failed in the background on this rank."""
        return self._saver.has_failed

    def note_validation(self, figures: Mapping[str, float]) -> None:
        """Notes an evaluation of the step just made, which may be the best so far."""
        if self._best is None:
            return
        name, side = self._best
        value = figures[name]
        before = self._best_value
        if math.isfinite(value) and (before is None or (value < before if side == "min" else value > before)):
            self._best_value = value
            self._is_best = True

    def is_due(self, step: int, decision: Decision) -> bool:
        """Whether to save now, after `step`: the same on every rank."""
        if step == self._saved_step:
            return False
        if decision.save or self._is_best:
            return True
        if self._never:
            return False
        early = step - self._first_step == FIRST_SAVE_STEP and not self._saved_any
        return early or any(every is not None and step % every == 0 for every in (self._times.steps, self._kept_steps))

    def save(self, step: int, validation: Mapping[str, float] | None, *, blocking: bool = False) -> None:
        """Saves the state after `step`, whose record must have been written. Every rank must call it."""
        with self._phases("save"):
            self._engine.settle()
            warning = self._saver.save(
                self._names.collect, partial(self._describe, step, validation), blocking=blocking
            )
        self._saved_step, self._saved_any, self._is_best = step, True, False
        self._saved_at = time.monotonic()
        if warning and not self._has_warned:
            self._has_warned = True
            self._console.line(f"save     {warning}")
        self.tell()

    def save_last(self, step: int, validation: Mapping[str, float] | None) -> None:
        """Saves the state after the last step of this start, unless that is done or nothing is to be saved; waits."""
        if step != self._saved_step and not (self._never and not self._saved_any):
            self.save(step, validation, blocking=True)
        with self._phases("save"):
            self._saver.wait()
        self.tell()

    def raise_failure(self) -> None:
        """Raises what a background save failed with; every rank must call it, after they agreed that one did."""
        self._saver.wait()

    def abandon(self) -> None:
        """Gives a save in progress a moment to end, when the run ends by an error."""
        with contextlib.suppress(Exception):  # the run's own error is the one to tell
            self._saver.wait(_GRACE_SECONDS)
        self.tell()

    def tell(self) -> None:
        """Says what was committed since the last call."""
        for saved in self._saver.take_finished():
            if self._directory is not None:
                text = _describe_saved(saved)
                self._directory.note("saved", saved.step, text)
                self._console.line(f"saved    step {saved.step}  {text}")

    @property
    def newest(self) -> str:
        """Where the newest checkpoint lies, for the end of a run; empty where there is none."""
        return str(checkpoint_folder(self._path, self._saved_step)) if self._saved_any else ""

    def _describe(self, step: int, validation: Mapping[str, float] | None, state: NamedState) -> StateRecord:
        scale = self._engine.loss_scale
        return StateRecord(
            step=step,
            position=self._course.position_after(step),
            num_updates=self._engine.num_updates,
            loss_scale=None if scale is None else {"value": scale.value, "good_steps": scale.good_steps},
            optimizer=state.optimizer,
            model=state.model,
            trained=tuple(name for name, each in self._engine.model.named_parameters() if each.requires_grad),
            layout=self._layout,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            validation=None
            if validation is None
            else {name: each for name, each in validation.items() if math.isfinite(each)},
            hugging_face=self._hugging_face,
        )

    @cached_property
    def _hugging_face(self) -> Mapping[str, Any]:
        """Asked once: training waits for the answer."""
        return describe_hugging_face(self._engine.model)

    def _tidy(self, keeper: Keeper, step: int) -> None:
        keeper.delete_old(lambda folder: self._phases.reach("save:during-deletion", step=step, path=folder))


def _describe_saved(saved: Saved) -> str:
    rate = saved.num_bytes / max(saved.write_seconds, 1e-9)
    return (
        f"{format_bytes(saved.num_bytes)}, training waited {format_seconds(saved.stall_seconds)}, "
        f"written in {format_seconds(saved.write_seconds)} ({format_bytes(rate)}/s)"
    )


def _in_steps(job: Job, span: Duration) -> int:
    return max(1, span.in_steps(total_steps=job.total_steps, steps_per_epoch=job.steps_per_epoch))


def _best_so_far(path: Path, name: str, side: str) -> float | None:
    """The best value of a figure in the records of the steps that are behind."""
    if not path.exists():
        return None
    values = [float(each.validation[name]) for each in read_steps(path) if each.validation and name in each.validation]
    finite = [value for value in values if math.isfinite(value)]
    return None if not finite else min(finite) if side == "min" else max(finite)


def _check_best(options: RunOptions, job: Job) -> None:
    if options.best_figure is None:
        return
    name, known = options.best_figure[0], ["loss", *job.metrics]
    if job.valid is None or options.evaluation_interval is None:
        raise UsageError(
            f"keep_best={options.keep_best!r}, and the run never evaluates before its end.",
            "The best checkpoint is found by evaluations on the validation data.",
            "Give Job(valid=...) and --evaluate-every, such as 200steps.",
        )
    if name not in known:
        raise UsageError(
            f"keep_best={options.keep_best!r} names no figure of this job.",
            f"It has {', '.join(known)}.",
            "Name one of them.",
        )


def _nothing() -> None:
    pass
