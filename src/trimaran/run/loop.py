"""The run: a generator loop over global batches that records, evaluates, and ends where all ranks agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from trimaran.batch import MicroBatch, RankBatch
from trimaran.data import BatchLoader
from trimaran.engine import Engine, StepResult
from trimaran.errors import JobError
from trimaran.job import Job
from trimaran.options import RunOptions
from trimaran.phases import Phase, Phases
from trimaran.records import StepRecord, TimingRecord
from trimaran.run.console import Console, Progress
from trimaran.run.decide import Agreement, Decision, StopRequest
from trimaran.run.directory import RunDirectory
from trimaran.run.saving import Saving
from trimaran.run.trackers import Trackers
from trimaran.world.device import memory_bytes
from trimaran.world.groups import World


@dataclass(frozen=True)
class Rates:
    """What turns a step's seconds into the figures people compare."""

    flops_per_sample: float
    peak_flops_per_second: float | None


@dataclass(frozen=True)
class _Taken:
    """A step that was made and is not yet recorded; `seconds` are those of training, without its evaluation."""

    result: StepResult
    decision: Decision
    seconds: float
    phases: Mapping[Phase, float]
    validation: dict[str, float] | None


class Run:
    """A run in progress: iterate over it for this rank's share of each global batch, and `step` each one.

    Built by `start`; a context manager, whose end evaluates, writes the weights and says where they are. Every rank
    runs the same loop; `break` is early stopping, and must be decided from figures that all ranks share.
    """

    def __init__(
        self,
        *,
        job: Job,
        options: RunOptions,
        world: World,
        engine: Engine,
        loader: BatchLoader,
        validation: Callable[[], BatchLoader] | None,
        directory: RunDirectory | None,
        trackers: Trackers | None,
        console: Console,
        phases: Phases,
        rates: Rates,
        stop_request: StopRequest,
        saving: Saving,
        audit: Callable[[int], None],
        first_step: int,
        resources: ExitStack,
        finish: Callable[[Run], None],
    ) -> None:
        self.job = job
        self.engine = engine
        self.validation: dict[str, float] | None = None
        self.last_step = first_step
        self.last_loss: float | None = None
        self.stopped = False
        self._options = options
        self._world = world
        self._loader = loader
        self._validation_loader = validation
        self._directory = directory
        self._trackers = trackers
        self._console = console
        self._phases = phases
        self._rates = rates
        self._stop_request = stop_request
        self._saving = saving
        self._audit = audit
        self._resources = resources
        self._finish = finish
        self._evaluate_every = self._evaluation_steps()
        self._is_iterated = False
        self._unrecorded: _Taken | None = None
        self._decision = Decision(0.0, 0, False)
        self._step_began = time.perf_counter()
        self._seconds_per_step = 0.0
        self.seconds_by_kind: dict[str, float] = {}

    def __iter__(self) -> Iterator[RankBatch]:
        """This rank's share of each global batch in turn, until the job's last or an agreed stop. Once only."""
        if self._is_iterated:
            raise JobError(
                "the run is iterated over a second time.",
                "Each batch of a run is trained on once, and another loop would begin with the first one again.",
                "Put what you do into one loop, or start another run.",
            )
        self._is_iterated = True
        self._step_began = time.perf_counter()
        batches = iter(self._loader)
        self._phases.step = self.last_step + 1
        batch = self._next(batches)
        agreement = self._ask(batch) if batch is not None else None
        while batch is not None and agreement is not None:
            self._decision = agreement.settle()
            if self._decision.save_failed:
                self._saving.raise_failure()
            self._saving.tell()
            if self._decision.stop:
                self.stopped = True
                return
            if self._saving.is_due(self.last_step, self._decision):
                self._save()
            self._phases.step = batch.index + 2
            upcoming = self._next(batches)
            # Asked now, so that it travels under the step that the caller is about to run.
            agreement = self._ask(upcoming) if upcoming is not None else None
            self._phases.step = batch.index + 1
            yield replace(batch, total_weight=self._decision.weight)
            self._take_result()
            if self.last_step != batch.index + 1:
                raise JobError(
                    f"the loop went past batch {batch.index} without a step.",
                    "The order of samples is a promise; each batch of a run is trained on.",
                    "Call run.step(batch) in every turn, or break.",
                )
            batch = upcoming

    def step(self, batch: RankBatch) -> StepResult:
        """One optimizer step on a batch of this run: `engine.accumulate(batch)` and `engine.update()`."""
        last = self.engine.last_result
        if last is not None and last.index >= batch.index:
            raise JobError(
                f"batch {batch.index} was stepped on already.",
                "Each batch of a run is trained on once.",
                "Call run.step(batch) once in every turn.",
            )
        return self.engine.step(batch)

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the validation data, exactly. Every rank must call it."""
        if self._validation_loader is None:
            raise JobError("the job has no validation data.", "An evaluation needs some.", "Give Job(valid=...).")
        loader = self._validation_loader()
        try:
            self.validation = self.engine.evaluate(loader)
        finally:
            loader.close()
        return self.validation

    def ask_to_stop(self, reason: str) -> None:
        """Asks all ranks to save and leave at the next step's edge."""
        self._stop_request.ask(reason)

    def mark_saved(self) -> None:
        """Says that the weights are on disk: from here on a signal ends what remains at once."""
        self._stop_request.is_saved = True

    @property
    def newest_checkpoint(self) -> str:
        """Where the newest checkpoint lies; empty where nothing was saved."""
        return self._saving.newest

    @property
    def stop_reason(self) -> str:
        """Why this rank was asked to stop: a signal's name, or what `ask_to_stop` was given; empty if it was not."""
        return self._stop_request.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._resources:
            try:
                if error is None:
                    self._end()
                else:
                    self._fail(error)
            finally:
                self._console.end_live()
                self._loader.close()

    def _end(self) -> None:
        try:
            self._take_result()
            self._evaluate_last()
            validation = self._last_validation
            self._record_previous()
            self._console.end_live()
            self._saving.save_last(self.last_step, validation)
        except Exception as error:
            self._fail(error)
            raise
        self._finish(self)

    def _fail(self, error: BaseException) -> None:
        """Lets a save in progress end, and records why the run ends here."""
        self._saving.abandon()
        if self._directory is not None:
            self._directory.note("failed", self.last_step, f"{type(error).__name__}: {error}")

    def _save(self) -> None:
        """Saves after the last step made; its record comes first, so that no checkpoint is ahead of the records."""
        validation = self._last_validation
        self._record_previous()
        began = time.perf_counter()
        self._saving.save(self.last_step, validation)
        self._step_began += time.perf_counter() - began  # the next step's time is its own

    @property
    def _last_validation(self) -> dict[str, float] | None:
        return self._unrecorded.validation if self._unrecorded is not None else None

    def _next(self, batches: Iterator[RankBatch]) -> RankBatch | None:
        with self._phases("data"):
            return next(batches, None)

    def _ask(self, batch: RankBatch) -> Agreement:
        return Agreement(
            self._world,
            weight=self.engine.local_weight(batch),
            num_tokens=count_tokens(batch.micro_batches, self.job.input_keys) if self._world.leads_data_rank else 0,
            stop=bool(self._stop_request.reason),
            save=self._saving.wants_save,
            save_failed=self._saving.has_failed,
        )

    def _take_result(self) -> None:
        """Takes the step just made into the records, which show it one step late, and evaluates where it is due."""
        result = self.engine.last_result
        if result is None or result.index + 1 == self.last_step:
            return
        seconds = time.perf_counter() - self._step_began
        self._record_previous()
        self.last_step = result.index + 1
        if self._options.audit_every is not None and self.last_step % self._options.audit_every == 0:
            self._audit(self.last_step)
        due = self._evaluate_every and self.last_step % self._evaluate_every == 0
        validation = self.evaluate() if due else None
        if validation is not None:
            self._saving.note_validation(validation)
        self._unrecorded = _Taken(result, self._decision, seconds, self._phases.take(), validation)
        self._step_began = time.perf_counter()

    def _evaluate_last(self) -> None:
        """Evaluates after the last step where its own interval has not, and counts that with the step."""
        last = self._unrecorded
        if last is None or last.validation is not None or self._validation_loader is None or self.stopped:
            return
        validation = self.evaluate()
        spent = {phase: last.phases[phase] + more for phase, more in self._phases.take().items()}
        self._unrecorded = replace(last, validation=validation, phases=spent)

    def _record_previous(self) -> None:
        """Writes and shows the step before, whose figures have arrived by now."""
        if self._unrecorded is None:
            return
        taken, self._unrecorded = self._unrecorded, None
        with self._phases("record"):
            record = StepRecord(
                step=taken.result.index + 1,
                loss=taken.result.loss,
                weight=taken.decision.weight,
                grad_norm=taken.result.grad_norm,
                lr=taken.result.lr,
                skipped=taken.result.skipped,
                validation=taken.validation,
            )
            self.last_loss = record.loss
            if self._directory is not None:
                self._directory.append(record)
                if record.skipped:
                    self._directory.note("skipped", record.step, f"gradient norm {record.grad_norm}")
        if self._trackers is not None:
            self._trackers.log(record)
        self._time_step(record, taken)

    def _time_step(self, record: StepRecord, taken: _Taken) -> None:
        for phase, took in taken.phases.items():
            self.seconds_by_kind[phase] = self.seconds_by_kind.get(phase, 0.0) + took
        smooth = self._seconds_per_step
        self._seconds_per_step = taken.seconds if smooth == 0 else 0.9 * smooth + 0.1 * taken.seconds
        if self._directory is not None:
            rate = self.job.global_batch / max(taken.seconds, 1e-9)
            spent = {str(phase): round(each, 6) for phase, each in taken.phases.items() if each}
            seconds = round(taken.seconds + taken.phases["evaluate"], 6)
            self._directory.append(TimingRecord(record.step, seconds, round(rate, 3), spent))
        self._console.progress(self._progress(record, taken.decision))
        if record.validation is not None:
            self._console.line(f"step {record.step}  validation  {format_figures(record.validation)}")

    def _progress(self, record: StepRecord, decision: Decision) -> Progress:
        per_second = 1.0 / self._seconds_per_step
        flops = self._rates.flops_per_sample * self.job.global_batch * per_second
        peak = self._rates.peak_flops_per_second
        mfu = flops / (peak * self._world.size) if peak and flops else 0.0
        return Progress(
            step=record.step,
            total_steps=self.job.total_steps,
            loss=record.loss,
            grad_norm=record.grad_norm,
            lr=record.lr,
            skipped=record.skipped,
            rate=(decision.num_tokens or self.job.global_batch) * per_second,
            rate_unit="tok/s" if decision.num_tokens else "samples/s",
            mfu=mfu if 0 < mfu <= 1 else None,  # more than all: the peak was measured on a busy machine
            memory_bytes=memory_bytes(self._world.device),
            eta_seconds=(self.job.total_steps - record.step) * self._seconds_per_step,
        )

    def _evaluation_steps(self) -> int:
        interval = self._options.evaluation_interval
        if interval is None or self._validation_loader is None:
            return 0
        return max(1, interval.in_steps(total_steps=self.job.total_steps, steps_per_epoch=self.job.steps_per_epoch))


def format_figures(figures: Mapping[str, float]) -> str:
    """Named figures on one line: "loss 1.2345  accuracy 0.6789"."""
    return "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def count_tokens(micro_batches: Iterable[MicroBatch], input_keys: Mapping[str, str]) -> int:
    """Tokens in these micro-batches, where the model's first input is a matrix of ids; else 0."""
    key = next(iter(input_keys.values()))
    inputs = [each.tensors[key] for each in micro_batches if not each.weightless and key in each.tensors]
    return sum(each.numel() for each in inputs if each.dim() == 2 and not each.is_floating_point())
