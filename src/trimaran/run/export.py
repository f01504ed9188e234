"""Weights out of a run: which of its checkpoints is meant, and whether it is as it was written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trimaran.checkpoint import Checkpoint, describe_steps, find_checkpoint, list_steps
from trimaran.checkpoint.export import SHARD_SIZE, ExportedWeights, ExportRequest, export_checkpoint
from trimaran.errors import RunError
from trimaran.records import CHECKPOINTS_FOLDER, RUN_FILE, read_run
from trimaran.run.directory import read_lineage
from trimaran.run.resume import Source


def export_weights(
    run: str | Path,
    out: str | Path,
    *,
    hf: bool = False,
    trainable: bool = False,
    shard_size: str = SHARD_SIZE,
) -> ExportedWeights:
    """Writes the weights of a run's checkpoint to `out`, and says what it wrote. For one process; needs no GPU.

    `run` is a run's directory, or "runs/a@100" for its checkpoint of step 100; without a step it is the newest that
    is whole. `out` ending in .safetensors becomes one file, otherwise a folder: model.safetensors, or, above
    `shard_size`, several files with an index. Tensors keep their types and the names of the model's `state_dict`; tied
    ones stand once, by their first name.

    `trainable` takes the trained parameters alone. `hf` adds what `from_pretrained` reads; with `trainable` that is
    the adapter of a PEFT model. Raises UsageError for what cannot be meant, an `out` that exists among it, RunError
    for a run without such a checkpoint, and CheckpointError for a disk that cannot be written.
    """
    request = ExportRequest(Path(out), hf=hf, trainable=trainable, shard_size=shard_size)
    checkpoint, passed_over = _find(Source("from", str(run)))
    return replace(export_checkpoint(checkpoint, request), passed_over=tuple(passed_over))


def _find(source: Source) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that is named, or the newest one that counts and has its bytes; and why newer ones have not."""
    run = source.run
    if not os.path.isfile(run / RUN_FILE):
        raise RunError(
            f"{run} holds no run." if run.is_dir() else f"{run} is no directory of a run.",
            "A run is known by its run.json.",
            "Give the directory of a run that has saved, such as runs/a, or runs/a@200 for its step 200.",
        )
    lineage = read_lineage(run, read_run(run / RUN_FILE).id)
    steps = list_steps(run)
    if not steps:
        raise RunError(
            f"{run} has no checkpoints.",
            f"A run saves them in {CHECKPOINTS_FOLDER}/ as it goes; one that ended before its first has none.",
            "Give another run, or run this one again.",
        )
    if source.step is not None and source.step not in steps:
        raise RunError(
            f"{run} has no checkpoint of step {source.step}.",
            f"It has those of steps {describe_steps(steps)}.",
            f"Name one of them, such as {run}@{steps[0]}, or none for the newest.",
        )
    wanted = steps if source.step is None else [source.step]
    found, refused = find_checkpoint(run, lineage, wanted)
    if found is None:
        raise RunError(
            f"no checkpoint of {run} can be used: {' '.join(refused)}"
            if source.step is None
            else f"the checkpoint of {source.text} cannot be used: {refused[0]}",
            "Weights are taken from a checkpoint that is whole.",
            "Name another step or another run.",
        )
    return found, refused
