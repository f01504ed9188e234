"""`trimaran verify JOB`: is a layout the same as one process? Starts the processes of both sides and compares."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from trimaran.cli.flags import parse_verb, parse_with_job
from trimaran.cli.job_file import call_job_function, load_job_function, require_job_first
from trimaran.errors import UsageError
from trimaran.options import Device, RunOptions
from trimaran.world.environment import discover
from trimaran.world.workers import start_workers

if TYPE_CHECKING:
    from trimaran.job import Job
    from trimaran.layout import ResolvedLayout

PROGRAM = "trimaran verify"


@dataclass(frozen=True)
class Verify:
    """Is a layout the same as one process? Runs both on the same samples and compares; exit code 1 for a difference."""

    job: tyro.conf.Positional[Path]
    """The job file: Python, with a function job() that returns a trimaran.Job. Its own arguments make it small."""
    layout: str = ""
    """How the job is spread, such as "dp=2 micro_batch=4"; in float64 unless it names a precision."""
    procs: int | None = None
    """Processes of the layout; without it as many as the layout needs."""
    against: str = ""
    """What it is compared with; without it one process that sees the whole batch at once, at the same precision."""
    layouts: Literal["all"] | None = None
    """Verify all layouts of --procs processes, one line each."""
    steps: int | None = None
    """Optimizer steps of the job's run, from its first; without it 5."""
    device: Device = "auto"
    """auto takes cuda, else the CPU."""
    json: bool = False
    """Print one JSON object in place of lines."""
    seed: int | None = None
    """Seed of weights, order and randomness, in place of the job's own."""
    global_batch: int | None = None
    """Samples of one optimizer step over all processes, in place of the job's own."""
    traceback: bool = False
    """Show the whole Python traceback of an error."""

    def __post_init__(self) -> None:
        RunOptions(device=self.device)  # the same values, the same refusals
        if self.procs is not None and self.procs < 1:
            raise UsageError(f"--procs {self.procs}.", "It counts processes.", "Give 1 or more.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"--steps {self.steps}.", "Steps are counted from 1.", "Give 1 or more.")
        if self.layouts is not None and self.layout:
            raise UsageError(
                f"--layouts {self.layouts} and --layout {self.layout!r}.",
                "One layout is verified in detail, or all of them in a line each.",
                "Give one of them.",
            )
        if self.layouts is not None and self.procs is None:
            raise UsageError(
                f"--layouts {self.layouts} without --procs.",
                "All layouts means those of so many processes.",
                "Add --procs 2, or 4.",
            )
        if self.layouts is None and not self.layout and self.procs is None:
            raise UsageError(
                "No layout is given.",
                "It is what is compared with one process.",
                'Write --layout "dp=2", or --procs 2 for all of them in dp.',
            )


def main(words: Sequence[str]) -> int:
    """Starts as many processes as the largest side has. Returns the exit code: 0 where all is equal, else 1."""
    require_job_first(words, PROGRAM)
    own = list(words[: words.index("--")] if "--" in words else words)
    if own[0] in ("-h", "--help"):
        parse_verb(Verify, own, program=PROGRAM)
    command, job = read_command(words)
    _refuse_launcher()
    num_procs = _count_processes(command, job)
    with tempfile.TemporaryDirectory(prefix="trimaran-") as folder:
        file = Path(folder) / "equal.json"
        # -P: as for the command itself, the current folder is not imported from.
        worker = [sys.executable, "-P", "-m", "trimaran.cli.verify_worker", str(file), *words]
        code = start_workers(worker, num_procs=num_procs, threads_per_worker=1)
        return code or int(not json.loads(file.read_text(encoding="utf-8")))


def read_command(words: Sequence[str]) -> tuple[Verify, Job]:
    """The flags and the job that these words say."""
    path = Path(words[0])
    function = load_job_function(path)
    command, arguments = parse_with_job(Verify, function, words, program=f"{PROGRAM} {path}")
    job = call_job_function(function, arguments, path)
    return command, job.with_overrides(steps=None, seed=command.seed, global_batch=command.global_batch)


def plan(command: Verify, job: Job) -> Iterator[tuple[ResolvedLayout, ResolvedLayout]]:
    """The layouts to verify, each with its reference. Raises LayoutError for what does not fit."""
    from trimaran.prove.verify_layouts import choose_reference, enumerate_layouts, parse_layout, resolve

    wanted = enumerate_layouts(job, num_ranks=command.procs or 1) if command.layouts else [parse_layout(command.layout)]
    for layout in wanted:
        resolved = resolve(layout, job, num_ranks=command.procs)
        yield resolved, choose_reference(command.against, resolved, job)


def _count_processes(command: Verify, job: Job) -> int:
    """As many as the largest side needs; what is wrong with any is told before a process starts."""
    from trimaran.prove.verify_layouts import choose_steps, count_ranks

    choose_steps(job, command.steps)
    return max(count_ranks(side) for sides in plan(command, job) for side in sides)


def _refuse_launcher() -> None:
    environment = discover()
    if environment is not None and environment.world_size > 1:
        raise UsageError(
            f"{environment.launcher} started {environment.world_size} processes of {PROGRAM}.",
            "It starts the processes of both sides itself.",
            f"Write {PROGRAM} JOB.py without a launcher; tm.verify_job is for processes that are there already.",
        )
