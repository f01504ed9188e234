"""The end of a run: weights on disk, figures beside baselines, a sample, and what to run next."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from safetensors.torch import save_model
from torch import nn

from trimaran.engine import evaluation_mode
from trimaran.records import WEIGHTS_FILE
from trimaran.run.console import Console
from trimaran.run.directory import RunDirectory
from trimaran.run.loop import Run, format_figures
from trimaran.units import format_seconds
from trimaran.world.groups import World
from trimaran.world.rng import seed_everything


def finish_run(run: Run, *, directory: RunDirectory | None, console: Console, world: World) -> None:
    """Writes the weights and prints the end; on rank 0, after the last step. The others have nothing to do."""
    if directory is None:
        return
    path = directory.owned_path(WEIGHTS_FILE)
    _save_weights(run.engine.model, path)
    directory.note("stopped" if run.stopped else "finished", run.last_step)
    console.line("")
    if run.stopped:
        console.line(f"stopped on request after step {run.last_step}/{run.job.total_steps}")
    console.line(f"loss     {run.last_loss:.4f} at step {run.last_step}")
    if run.validation is not None and not run.stopped:
        console.line(f"valid    {format_figures(run.validation)}")
        for name, baseline in run.job.baselines.items():
            console.line(f"         {_compare(name, baseline(), run.validation)}")
    console.line(f"time     {_describe_time(run.seconds_by_kind)}")
    if run.job.sample is not None and not run.stopped:
        seed_everything(run.job.seed)
        with torch.no_grad(), evaluation_mode(run.engine.model):
            console.lines(["sample", *run.job.sample(run.engine.model).splitlines()])
    console.line(f"weights  {path}")


def _save_weights(model: nn.Module, path: os.PathLike[str]) -> None:
    """Whole or not at all: written under another name, flushed, renamed. Tied tensors are stored once."""
    temporary = f"{os.fspath(path)}.tmp"
    save_model(model, temporary)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
