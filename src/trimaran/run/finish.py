"""The end of a run: weights on disk, figures beside baselines, a sample, and what to run next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from trimaran.checkpoint import save_trained_weights, save_weights
from trimaran.engine import StateBytes, evaluation_mode, measure_state_bytes
from trimaran.errors import JobError
from trimaran.records import METRICS_FILE, TRAINED_FILE, WEIGHTS_FILE
from trimaran.run.console import Console
from trimaran.run.describe import describe_state
from trimaran.run.directory import RunDirectory
from trimaran.run.drills import Drills
from trimaran.run.loop import Run, format_figures
from trimaran.units import format_bytes, format_seconds
from trimaran.world.device import memory_bytes
from trimaran.world.groups import World
from trimaran.world.rng import seed_everything

Result = TypeVar("Result")


def finish_run(
    run: Run,
    *,
    directory: RunDirectory | None,
    console: Console,
    world: World,
    predicted: StateBytes,
    drills: Drills | None,
) -> None:
    """Writes the weights and prints the end, after the last step. Every rank must call it; rank 0 does the work.

    The others give their parts where the model is cut over ranks, and draw the sample with rank 0.
    """
    model, dealt = run.engine.model, run.engine.dealt
    some_frozen = not all(each.requires_grad for each in model.parameters())
    if directory is None:
        if run.engine.is_cut:
            save_weights(model, None, dealt)
            if some_frozen:
                save_trained_weights(model, None, dealt)
            if run.job.sample is not None and not run.stop_reason:
                _draw_sample(run)
        return
    path = directory.owned_path(WEIGHTS_FILE)
    save_weights(model, path, dealt)
    if some_frozen:
        save_trained_weights(model, directory.owned_path(TRAINED_FILE), dealt)
    if run.stopped:
        directory.note("stopped", run.last_step, run.stop_reason or "asked on another rank")
    else:
        directory.note("finished", run.last_step)
    run.mark_saved()
    console.line("")
    if run.stopped:
        console.line(f"stopped on request after step {run.last_step}/{run.job.total_steps}")
    if run.last_loss is not None:
        console.line(f"loss     {run.last_loss:.4f} at step {run.last_step}")
    if run.validation is not None and not run.stopped:
        console.line(f"valid    {format_figures(run.validation)}")
    console.line(f"time     {_describe_time(run.seconds_by_kind)}")
    console.line(f"memory   {_describe_memory(run, predicted, world)}")
    if drills is not None:
        console.lines(drills.describe_unfired())
    if run.newest_checkpoint:
        console.line(f"saved    {run.newest_checkpoint}")
    console.line(f"weights  {path}" + (f"; the trained ones alone in {TRAINED_FILE}" if some_frozen else ""))
    if not run.stop_reason:
        _compare_and_sample(run, console, path)
    if run.stopped and run.newest_checkpoint:
        console.line(f"next     the same command continues the run, with --run {directory.path}")
    elif run.stopped:
        console.line("next     nothing was saved to continue from (--save-every never): the same command begins again")
    else:
        console.line(f"next     {_describe_next(run, directory.path)}")


def _describe_next(run: Run, path: Path) -> str:
    if run.newest_checkpoint:
        return f"trimaran export {path} OUT gives the weights to other tools; {METRICS_FILE} has the curve"
    return f"safetensors.torch.load_model(model, file) reads the weights; {METRICS_FILE} beside them has the curve"


def _compare_and_sample(run: Run, console: Console, weights: Path) -> None:
    """What the job itself has to say at the end; it may take its time, so it is announced."""
    # First what other ranks may wait for.
    sample = None if run.job.sample is None else _ask("sample", partial(_draw_sample, run), weights)
    if run.validation is not None and run.job.baselines:
        console.line(f"beside   computing {', '.join(run.job.baselines)} …")
        for name, baseline in run.job.baselines.items():
            figures = _ask(f"baselines[{name!r}]", baseline, weights)
            console.line(f"         {_compare(name, figures, run.validation)}")
    if sample is not None:
        console.lines(["sample", *sample.splitlines()])


def _draw_sample(run: Run) -> str:
    assert run.job.sample is not None
    seed_everything(run.job.seed)
    with torch.no_grad(), evaluation_mode(run.engine.model):
        return run.job.sample(run.engine.model)


def _ask(name: str, function: Callable[[], Result], weights: Path) -> Result:
    """What the job's own function gives; where it raises, nothing of the run is lost, and the error says so."""
    try:
        return function()
    except Exception as problem:
        raise JobError(
            f"the job's {name} raised {type(problem).__name__}: {problem}.",
            f"It is called when training has ended; the weights are in {weights}.",
            "Correct it; --traceback shows where.",
        ) from problem


def _describe_memory(run: Run, predicted: StateBytes, world: World) -> str:
    """What lives from step to step as it was measured, beside what was predicted, and the peak."""
    parameters = list(run.engine.updated.values())
    found = StateBytes(
        parameters=sum(each.nbytes for each in parameters),
        gradients=sum(each.grad.nbytes for each in parameters if each.grad is not None),
        optimizer=measure_state_bytes(run.engine.optimizer),
    )
    peak = format_bytes(memory_bytes(world.device))
    return f"{describe_state(found)} (predicted {describe_state(predicted, short=True)}); peak {peak} per process"


def _compare(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """ "trigram table: loss 1.9000 (ours 1.5000, 21 % lower)" for each figure both have."""
    parts = []
    for figure, value in theirs.items():
        if figure in ours and value:
            change = 100 * (ours[figure] - value) / abs(value)
            parts.append(f"{figure} {value:.4f} (ours is {abs(change):.0f} % {'higher' if change > 0 else 'lower'})")
    return f"{name}: {'  '.join(parts)}"


def _describe_time(seconds_by_kind: Mapping[str, float]) -> str:
    total = sum(seconds_by_kind.values())
    spent = sorted(seconds_by_kind.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {100 * seconds / total:.0f} %" for kind, seconds in spent if seconds > 0.005 * total)
    return f"{format_seconds(total)}: {shares}" if total else "0 s"
