"""The schema of what a run writes: run.json, metrics, timing and events. Written and read here only. No torch.

`metrics.jsonl` holds only what a rerun repeats, so that two runs of one job can be compared byte by byte; whatever
depends on the clock or the machine stands in the other files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimaran.errors import RunError

FORMAT = 2
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"
EVENTS_FILE = "events.jsonl"
WEIGHTS_FILE = "model.safetensors"
TRAINED_FILE = "trained.safetensors"
"""The trained parameters alone, written beside the model where some are frozen."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. `step` counts from 1; `loss` is the global batch's sum over its `weight`."""

    step: int
    loss: float
    weight: float
    grad_norm: float
    lr: float
    skipped: bool = False
    validation: Mapping[str, float] | None = None


@dataclass(frozen=True)
class TimingRecord:
    """Wall seconds of one step, by phase, as rank 0 saw them."""

    step: int
    seconds: float
    samples_per_second: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class EventRecord:
    """Something that happened: started, resumed, forked, saved, skipped, stopped, finished, failed."""

    time: str
    event: str
    step: int
    detail: str = ""


@dataclass(frozen=True)
class Derived:
    """A value computed from others, with the arithmetic that gave it."""

    value: Any
    reason: str


@dataclass(frozen=True)
class RunRecord:
    """Everything resolved when a run starts. Two runs are of one job when their `identity` is equal.

    `id` is the run's own, drawn when it first started; `origin` says from what other run it began, if any.
    """

    name: str
    id: str
    identity: Mapping[str, Any]
    layout: str
    options: Mapping[str, Any]
    derived: Mapping[str, Derived]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    git_commit: str | None = None
    job_file_sha256: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def to_line(record: StepRecord | TimingRecord | EventRecord) -> str:
    """One line of JSON, without the newline. Numbers that are not finite are the strings "nan", "inf", "-inf"."""
    values = {key: value for key, value in asdict(record).items() if value is not None and value != ""}
    return json.dumps(_finite(values), allow_nan=False, separators=(", ", ": "))


def read_steps(path: Path) -> Iterator[StepRecord]:
    """The steps of a metrics.jsonl; a torn last line, which a kill can leave, ends them."""
    for values in _read_lines(path):
        numbers = {key: float(values[key]) for key in ("loss", "weight", "grad_norm", "lr")}
        measured = values.get("validation")
        validation = None if measured is None else {name: float(value) for name, value in measured.items()}
        yield StepRecord(**{**values, **numbers, "validation": validation})


def read_events(path: Path) -> Iterator[EventRecord]:
    """The events of an events.jsonl, oldest first."""
    for values in _read_lines(path):
        yield EventRecord(**values)


def cut_back(path: Path, step: int) -> int:
    """Removes from a metrics.jsonl or timing.jsonl what lies after `step`, in one rename; returns how many steps stay.

    A run that continues from a checkpoint makes those steps again. Does nothing where there is no such file.
    """
    if not path.exists():
        return 0
    kept = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):  # a torn write: what stands behind it is made again
                break
            kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return len(kept)


def drop_torn_line(path: Path) -> None:
    """Removes what a write that was broken off, as by a full disk, left behind the last whole line of a .jsonl file.

    Does nothing where there is no such file.
    """
    if not path.exists():
        return
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def write_run(path: Path, record: RunRecord) -> None:
    """Writes run.json whole or not at all."""
    text = json.dumps(_finite(asdict(record)), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_run(path: Path) -> RunRecord:
    """The run.json at `path`. Raises RunError for one that is damaged or of a later version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["format"]
        if version == FORMAT:
            values["derived"] = {key: Derived(**each) for key, each in values["derived"].items()}
            return RunRecord(**values)
    except (ValueError, KeyError, TypeError, OSError) as problem:
        raise RunError(
            f"{path} cannot be read: {type(problem).__name__}: {problem}.",
            "A run directory is known by its run.json.",
            "Choose another --run, or remove the directory.",
        ) from problem
    raise RunError(
        f"{path} has format {version!r}; this version reads format {FORMAT}.",
        "A record is read only by a version that knows its format.",
        "Use the version that wrote it, or choose another --run.",
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
