"""What a resolved run says of itself: its identity for later starts, its record, and the head it prints."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimaran.checkpoint import digest_files
from trimaran.data import fingerprint
from trimaran.engine import StateBytes
from trimaran.job import Job, ScaledRate, Weights
from trimaran.layout import ResolvedLayout
from trimaran.options import RunOptions
from trimaran.records import Derived, RunRecord
from trimaran.run.resume import Course
from trimaran.units import format_bytes, format_count, format_number
from trimaran.world.device import describe_device
from trimaran.world.groups import World


@dataclass(frozen=True)
class Origin:
    """Where a job came from: its file and the arguments its function was called with."""

    job_file: Path | None = None
    arguments: Mapping[str, Any] | None = None


def identify(job: Job, origin: Origin) -> dict[str, Any]:
    """What makes two runs the same job: arguments, lengths, rules and data; not the layout, not the options."""
    return {
        "arguments": {name: _plain(value) for name, value in (origin.arguments or {}).items()},
        "global_batch": job.global_batch,
        "steps": job.total_steps,
        "samples": job.total_samples,
        "seed": job.seed,
        "init": job.init,
        "weights": None if job.weights_in is None else identify_weights(job.weights_in),
        "inputs": dict(job.input_keys),
        "loss": _without_addresses(repr(job.loss)),
        "metrics": {name: _without_addresses(repr(metric)) for name, metric in job.metrics.items()},
        "optimizer": _without_addresses(job.optimizer.describe()),
        "schedule": describe_schedule(job),
        "clip": job.clip,
        "data": {"length": len(job.data), "fingerprint": fingerprint(job.data)},
        "valid": None if job.valid is None else {"length": len(job.valid), "fingerprint": fingerprint(job.valid)},
    }


def identify_weights(weights: Weights) -> dict[str, Any]:
    """Which pretrained weights a job starts from: their content and how names are mapped, not where they lie."""
    return {
        "digest": digest_files(Path(weights.path)),
        "rename": dict(weights.rename),
        "partial": weights.partial if isinstance(weights.partial, bool) else list(weights.partial),
    }


def identify_parameters(model: nn.Module) -> dict[str, str]:
    """Name -> shape of every parameter, as it is compared with an earlier start's."""
    return {name: "×".join(map(str, each.shape)) or "scalar" for name, each in model.named_parameters()}


def describe_schedule(job: Job) -> str:
    """The schedule's own words."""
    return job.schedule.describe(total_steps=job.total_steps, steps_per_epoch=job.steps_per_epoch)


def record_run(
    job: Job,
    layout: ResolvedLayout,
    options: RunOptions,
    world: World,
    origin: Origin,
    identity: Mapping[str, Any],
    rate: ScaledRate,
    run_id: str,
    begins_from: Mapping[str, Any],
) -> RunRecord:
    """run.json: everything resolved, each derived value with its reason."""
    derived = {
        "dp": Derived(layout.dp, f"{world.size} processes"),
        "micro_batch": Derived(layout.micro_batch, describe_batch(job, layout)),
        "lr": Derived(rate.value, rate.reason),
        "steps": Derived(job.total_steps, f"{job.total_samples} samples / {job.global_batch} a step, rounded up"),
    }
    return RunRecord(
        name=name_job(job, origin),
        id=run_id,
        identity=identity,
        layout=str(layout),
        options=asdict(options),
        derived=derived,
        machine={
            "processes": world.size,
            "nodes": world.num_nodes,
            "device": describe_device(world.device),
            "backend": world.backend,
            "threads_per_process": torch.get_num_threads(),
            "bit_reproducible": world.device.type == "cpu" or options.deterministic,
        },
        versions={"trimaran": version("trimaran"), "torch": torch.__version__, "python": platform.python_version()},
        git_commit=_git_commit(origin.job_file),
        origin=begins_from,
        job_file_sha256=None if origin.job_file is None else hashlib.sha256(origin.job_file.read_bytes()).hexdigest(),
    )


def describe_batch(job: Job, layout: ResolvedLayout) -> str:
    """The batch arithmetic: "64 samples = 2 dp × 8 micro-batch × 4 accumulated", or what does not divide evenly."""
    share = -(-job.global_batch // layout.dp)
    accumulated = -(-share // layout.micro_batch)
    product = layout.dp * layout.micro_batch * accumulated
    sign = "=" if product == job.global_batch else "≤"
    parts = f"{layout.dp} dp × {layout.micro_batch} micro-batch × {accumulated} accumulated"
    return f"{job.global_batch} samples {sign} {parts}"


def describe_length(job: Job, total_samples: int) -> str:
    """The length of the run: "1,000 steps = 2.4 epochs of 26,667 samples"."""
    epochs = total_samples / len(job.data)
    passes = f"{format_number(epochs)} {'epoch' if epochs == 1 else 'epochs'}"
    return f"{_count(job.total_steps, 'step', 'steps')} = {passes} of {_count(len(job.data), 'sample', 'samples')}"


def describe_state(state: StateBytes, *, short: bool = False) -> str:
    """The bytes that live from step to step: "parameters 26 MiB + gradients 26 MiB + optimizer 51 MiB"."""
    values = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    words = {name: "unknown" if size is None else format_bytes(size) for name, size in values.items()}
    return " + ".join(word if short else f"{name} {word}" for name, word in words.items())


def head_rows(
    course: Course,
    layout: ResolvedLayout,
    world: World,
    rate: ScaledRate,
    state: StateBytes,
    path: Path,
    num_tokens: int,
    begins: str,
) -> list[tuple[str, str, str]]:
    """The rows printed before step 1: (name, left, right). `num_tokens` is that of a global batch, 0 where none.

    `begins` says in a few words where the run begins.
    """
    job = course.job
    processes = f"{_count(world.size, 'process', 'processes')} on {_count(world.num_nodes, 'node', 'nodes')}"
    backend = f", {world.backend}" if world.size > 1 else f", {world.device.type}"
    return [
        ("layout", str(layout), processes + backend),
        ("batch", describe_batch(job, layout), f"{num_tokens:,} tokens" if num_tokens else ""),
        ("length", describe_length(job, course.total_samples + course.shift), ""),
        ("lr", rate.reason, describe_schedule(job)),
        ("memory", describe_state(state) + " per process", ""),
        ("run", str(path), begins),
    ]


def name_job(job: Job, origin: Origin) -> str:
    """The job's own name, else its file's."""
    return job.name or (origin.job_file.stem if origin.job_file else "job")


def title(job: Job, model: nn.Module, origin: Origin) -> str:
    """The first line: name, size, file."""
    total = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    size = f"{format_count(total)} parameters" + (f", {format_count(trained)} trained" if trained != total else "")
    return " · ".join(part for part in (name_job(job, origin), size, str(origin.job_file or "")) if part)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else _without_addresses(repr(value))


def _without_addresses(text: str) -> str:
    """What Python says of an object without a repr of its own holds its address, another in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _git_commit(job_file: Path | None) -> str | None:
    folder = job_file.resolve().parent if job_file else Path.cwd()
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
