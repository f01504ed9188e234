"""Job × Layout × RunOptions → Run: small builders, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from trimaran.checkpoint import LoadedWeights, StateNames, load_weights
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.engine import Engine, Trial, build_engine, predict_state_bytes, try_micro_batch
from trimaran.errors import DataError, UsageError
from trimaran.job import Job
from trimaran.layout import Layout, ResolvedLayout
from trimaran.options import RunOptions
from trimaran.phases import Phases
from trimaran.records import RunRecord
from trimaran.run.agree import agree_on_job, agree_on_weights, on_first_rank
from trimaran.run.audit import audit_replicas
from trimaran.run.checked import describe_unchecked
from trimaran.run.console import Console
from trimaran.run.decide import StopRequest, stop_on_signals
from trimaran.run.describe import Origin, head_rows, identify, identify_parameters, name_job, record_run, title
from trimaran.run.directory import RunDirectory, name_run
from trimaran.run.drills import DRILLS_FOLDER, build_drills
from trimaran.run.finish import finish_run
from trimaran.run.loop import Rates, Run, count_tokens
from trimaran.run.resume import Beginning, Course, Source, Way, find_beginning, plot_course, restore, take_over
from trimaran.run.saving import Saving
from trimaran.run.trackers import open_trackers
from trimaran.world.device import find_local_chip, set_numerics
from trimaran.world.environment import discover
from trimaran.world.groups import World, close_world, open_world

_EVENTS: Mapping[Way, str] = {
    "new": "started",
    "again": "started",
    "resumed": "resumed",
    "forked": "forked",
    "from": "started",
}


def start(
    job: Job,
    layout: Layout | str = "",
    *,
    run: str | Path | None = None,
    options: RunOptions | None = None,
    origin: Origin | None = None,
    fork: str | Path | None = None,
    weights_from: str | Path | None = None,
) -> Run:
    """Opens a run of `job`: a context manager to iterate over, one global batch at a time.

    Started alone it is one process; under `trimaran train --procs`, torchrun or srun every process must call it.
    `run` names its directory, and continues what was started there; None makes a new one. `fork` begins from another
    run's whole state, `weights_from` from its weights alone: "runs/a" for the newest checkpoint, "runs/a@200" for
    that of step 200. Raises TrimaranError for whatever does not fit, before step 1.
    """
    source = _source(fork, weights_from)
    options = options or RunOptions()
    origin = origin or Origin()
    wanted = Layout.parse(layout) if isinstance(layout, str) else layout
    environment = discover()
    layout = wanted.resolve(world_size=environment.world_size if environment else 1, global_batch=job.global_batch)
    _refuse_empty(job)
    with ExitStack() as resources:
        world = open_world(environment, layout, device=options.device)
        resources.callback(close_world)
        set_numerics(precision=layout.precision, deterministic=options.deterministic)
        identity = identify(job, origin)
        agree_on_job(world, {"layout": str(layout), "torch": torch.__version__} | identity)
        path = Path(world.gather_text(str(run) if run is not None else str(name_run(name_job(job, origin))))[0])
        directory = on_first_rank(world, partial(_open_directory, path, resources, named=run is not None))
        drills = build_drills(options.drill, rank=world.rank, world_size=world.size, marks=path / DRILLS_FOLDER)
        phases = Phases(observers=[] if drills is None else [drills])
        loaded: list[LoadedWeights] = []
        engine = build_engine(
            job,
            layout,
            world,
            phases,
            load_weights=_weights_loader(job, loaded),
            check_weights=partial(agree_on_weights, world),
        )
        if drills is not None:
            drills.attach(engine.model)
        identity |= {"parameters": identify_parameters(engine.model)}
        begins = find_beginning(world, directory, path, name_job(job, origin), identity, source)
        course = plot_course(job, begins, engine)
        loader = _training_loader(course, layout, world, options, first_step=begins.step)
        validation = None if job.valid is None else partial(_validation_loader, job, layout, world, options)
        trial, num_tokens = _try_job(engine, job, layout, world, validation)
        names = StateNames(engine.model, engine.optimizer, engine.updated, engine.dealt)
        names.collect()  # what cannot be saved is told now
        restore(begins, engine, names)
        phases.take()
        state = predict_state_bytes(engine.model, engine.optimizer)
        rate = job.optimizer.rate(job.global_batch)
        console = Console(active=world.rank == 0, log_every=options.log_every)
        rows = head_rows(course, layout, world, rate, state, path, num_tokens, begins.describe(course.job.total_steps))
        console.head(title(job, engine.model, origin), rows)
        console.lines(begins.lines())
        console.lines(f"weights  {job.weights_in.path}: {each}" for each in loaded if job.weights_in)
        console.lines(_describe_unused(trial.unused_parameters))
        console.lines(describe_unchecked(identity, origin, world.num_nodes))
        record = record_run(course.job, layout, options, world, origin, identity, rate, begins.run_id, begins.origin)
        trackers = on_first_rank(world, partial(open_trackers, options.track, record, path, console.line, begins.step))
        if trackers is not None:
            resources.callback(trackers.close)
        console.lines(on_first_rank(world, partial(_begin_records, directory, record, begins)) or [])
        chip = find_local_chip(world.device, layout.precision)
        stop_request = StopRequest()
        saving = Saving(
            course=course,
            options=options,
            layout=str(layout),
            world=world,
            engine=engine,
            names=names,
            path=path,
            directory=directory,
            console=console,
            phases=phases,
            beginning=begins,
            request=stop_request,
        )
        # From here on Ctrl-C asks to stop at a step's edge; before, there is nothing to save and it ends the start.
        resources.enter_context(stop_on_signals(stop_request))
        return Run(
            job=course.job,
            options=options,
            world=world,
            engine=engine,
            loader=loader,
            validation=validation,
            directory=directory,
            trackers=trackers,
            console=console,
            phases=phases,
            rates=Rates(trial.flops_per_sample, chip.peak(layout.precision) if chip else None),
            stop_request=stop_request,
            saving=saving,
            audit=partial(audit_replicas, world, names),
            first_step=begins.step,
            resources=resources.pop_all(),
            finish=partial(
                finish_run, directory=directory, console=console, world=world, predicted=state, drills=drills
            ),
        )


def train(
    job: Job,
    layout: Layout | str = "",
    *,
    run: str | Path | None = None,
    options: RunOptions | None = None,
    origin: Origin | None = None,
    fork: str | Path | None = None,
    weights_from: str | Path | None = None,
) -> Run:
    """Trains `job` to its end, or to an agreed stop, and returns the finished run with its last figures."""
    with start(job, layout, run=run, options=options, origin=origin, fork=fork, weights_from=weights_from) as running:
        for batch in running:
            running.step(batch)
    return running


def _source(fork: str | Path | None, weights_from: str | Path | None) -> Source | None:
    if fork is not None and weights_from is not None:
        raise UsageError(
            f"--fork {fork} and --from {weights_from}.",
            "A run begins from one other: from its whole state (--fork), or from its weights alone (--from).",
            "Give one of them.",
        )
    if fork is not None:
        return Source("forked", str(fork))
    return None if weights_from is None else Source("from", str(weights_from))


def _weights_loader(job: Job, loaded: list[LoadedWeights]) -> Callable[[nn.Module], None] | None:
    """What puts the job's pretrained weights into a model and adds to `loaded` what it did; None without any."""
    weights = job.weights_in
    if weights is None:
        return None
    return lambda model: loaded.append(load_weights(model, weights))


def _refuse_empty(job: Job) -> None:
    for name, source in (("data", job.data), ("valid", job.valid)):
        if source is not None and len(source) == 0:
            raise DataError(
                f"{name} has no samples.",
                "A run needs at least one to train on, and one to evaluate on where valid is given.",
                "Check the path, the split and any filter that made this source.",
            )


def _begin_records(directory: RunDirectory | None, record: RunRecord, begins: Beginning) -> list[str]:
    """Makes the directory this start's, on rank 0; returns what there is to say of it."""
    assert directory is not None
    directory.write_run(record)
    cleared = take_over(directory, begins)
    told = [record.layout, *begins.lines(), *cleared]
    directory.note(_EVENTS[begins.way], begins.step, "; ".join(" ".join(each.split()) for each in told))
    return cleared


def _open_directory(path: Path, resources: ExitStack, *, named: bool) -> RunDirectory:
    directory = RunDirectory.open(path)
    if not named:
        resources.callback(directory.discard_unused)
    resources.callback(directory.close)
    return directory


def _training_loader(
    course: Course, layout: ResolvedLayout, world: World, options: RunOptions, *, first_step: int = 0
) -> BatchLoader:
    job = course.job
    return build_loader(
        job.data,
        collate=job.collate,
        order=Order(len(job.data), job.seed),
        global_batch=job.global_batch,
        total_samples=course.total_samples,
        dp=layout.dp,
        dp_rank=world.place.dp,
        micro_batch=layout.micro_batch,
        first_step=first_step,
        shift=course.shift,
        num_workers=options.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def _validation_loader(job: Job, layout: ResolvedLayout, world: World, options: RunOptions) -> BatchLoader:
    assert job.valid is not None
    return build_loader(
        job.valid,
        collate=job.collate,
        order=Order(len(job.valid), job.seed, shuffle=False),
        global_batch=layout.dp * layout.micro_batch,
        total_samples=len(job.valid),
        dp=layout.dp,
        dp_rank=world.place.dp,
        micro_batch=layout.micro_batch,
        num_workers=options.num_workers,
        pin_memory=world.device.type == "cuda",
    )


def _try_job(
    engine: Engine,
    job: Job,
    layout: ResolvedLayout,
    world: World,
    validation: Callable[[], BatchLoader] | None,
) -> tuple[Trial, int]:
    """Runs the first micro-batch dry, and one of the validation, so that what fails is found now. On every rank.

    Returns what the dry micro-batch showed, and the tokens of a global batch.
    """
    loader = _training_loader(Course(job, 0, job.total_samples), layout, world, RunOptions())
    first = next(iter(loader)).micro_batches[0]
    loader.close()
    trial = try_micro_batch(engine, first, job.input_keys)
    if validation is not None:
        _try_validation(engine, validation())
    return trial, count_tokens([first], job.input_keys) * job.global_batch // first.num_samples


def _try_validation(engine: Engine, loader: BatchLoader) -> None:
    """Evaluates one batch, so that a metric that fails is found now and not at the end. Every rank must call it."""
    try:
        engine.evaluate(islice(loader, 1))
    finally:
        loader.close()


def _describe_unused(names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"unused   the first micro-batch gives no gradient to {shown}; an unused parameter's gradient is zero", ""]
