"""`trimaran verify JOB`: is a layout the same as one process? Starts the processes of both sides and compares."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from trimaran.cli.flags import parse_verb, parse_with_job
from trimaran.cli.job_file import call_job_function, load_job_function, require_job_first
from trimaran.errors import JobError, LayoutError, TrimaranError, UsageError
from trimaran.layout import Layout
from trimaran.options import Device, RunOptions
from trimaran.units import format_seconds
from trimaran.world.environment import discover
from trimaran.world.workers import start_workers

if TYPE_CHECKING:
    from trimaran.job import Job
    from trimaran.layout import ResolvedLayout
    from trimaran.prove.verify_compare import Verification
    from trimaran.prove.verify_side import Side

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


@dataclass(frozen=True)
class _Sides:
    """How a layout is run, and how a reference is."""

    run: Callable[[ResolvedLayout], Side]
    run_reference: Callable[[ResolvedLayout], Side]


def main(words: Sequence[str]) -> int:
    """Runs both sides and prints what came of it. Returns the exit code: 0 where all is equal, else 1."""
    require_job_first(words, PROGRAM)
    own = list(words[: words.index("--")] if "--" in words else words)
    if own[0] in ("-h", "--help"):
        parse_verb(Verify, own, program=PROGRAM)
    command, job = read_command(words)
    _refuse_launcher()
    with tempfile.TemporaryDirectory(prefix="trimaran-verify-") as folder:
        run = _starter(words, Path(folder))
        sides = _Sides(run, cache(run))  # a reference serves many layouts, and runs once
        return _verify_all(command, job, sides) if command.layouts else _verify_one(command, job, sides)


def read_command(words: Sequence[str]) -> tuple[Verify, Job]:
    """The flags and the job that these words say."""
    path = Path(words[0])
    function = load_job_function(path)
    command, arguments = parse_with_job(Verify, function, words, program=f"{PROGRAM} {path}")
    job = call_job_function(function, arguments, path)
    return command, job.with_overrides(steps=None, seed=command.seed, global_batch=command.global_batch)


def _starter(words: Sequence[str], folder: Path) -> Callable[[ResolvedLayout], Side]:
    """Runs a layout on processes of its own, which leave what it gave in the folder for a moment."""

    def run(layout: ResolvedLayout) -> Side:
        from trimaran.prove.verify_side import load_side

        place = Path(tempfile.mkdtemp(dir=folder))
        # -P: as for the command itself, the current folder is not imported from.
        worker = [sys.executable, "-P", "-m", "trimaran.cli.verify_worker", str(place), str(layout), *words]
        num_procs = layout.dp * layout.tp * layout.pp
        code = start_workers(worker, num_procs=num_procs, threads_per_worker=1)
        if code:
            raise KeyboardInterrupt  # the workers ended as they were asked to
        side = load_side(place)
        shutil.rmtree(place)
        return side

    return run


def _verify_one(command: Verify, job: Job, sides: _Sides) -> int:
    from trimaran.prove.verify_layouts import parse_layout
    from trimaran.prove.verify_report import render_verification, verification_as_json

    verification = _compare(command, job, parse_layout(command.layout), sides)
    if command.json:
        print(json.dumps(verification_as_json(verification), ensure_ascii=False, allow_nan=False))
    else:
        print(render_verification(verification))
    return 0 if verification.equal else 1


def _verify_all(command: Verify, job: Job, sides: _Sides) -> int:
    from trimaran.prove.verify_layouts import enumerate_layouts
    from trimaran.prove.verify_report import render_line, verification_as_json

    assert command.procs is not None
    began = time.monotonic()
    told: list[dict[str, Any]] = []
    counts = {"equal": 0, "differs": 0, "refused": 0}
    for layout in enumerate_layouts(job, num_ranks=command.procs):
        try:
            verification = _compare(command, job, layout, sides)
        except LayoutError as refusal:
            counts["refused"] += 1
            told.append({"layout": str(layout), "equal": None, "refused": refusal.value})
            line = f"refused  {layout}  {refusal.value}"
        except JobError:
            raise
        except TrimaranError as failure:
            counts["differs"] += 1
            told.append({"layout": str(layout), "equal": False, "failed": failure.value})
            line = f"failed   {layout}  {failure.value}"
        else:
            counts["equal" if verification.equal else "differs"] += 1
            told.append(verification_as_json(verification))
            line = render_line(verification)
        if not command.json:
            print(line, flush=True)
    seconds = time.monotonic() - began
    if command.json:
        print(json.dumps({"job": job.name, "layouts": told}, ensure_ascii=False, allow_nan=False))
    else:
        summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        print(f"\nlayouts  {summary} in {format_seconds(seconds)}, each against one process")
    return 1 if counts["differs"] or not counts["equal"] else 0


def _compare(command: Verify, job: Job, layout: Layout, sides: _Sides) -> Verification:
    from trimaran.prove.verify import compare_with
    from trimaran.prove.verify_layouts import choose_reference, choose_steps, resolve_alone

    choose_steps(job, command.steps)  # a wrong count is told before anything starts
    resolved = resolve_alone(layout, job, num_ranks=command.procs)
    reference = choose_reference(command.against, resolved, job)
    return compare_with(sides.run(resolved), job, resolved, reference, sides.run_reference, recut=not command.against)


def _refuse_launcher() -> None:
    environment = discover()
    if environment is not None and environment.world_size > 1:
        raise UsageError(
            f"{environment.launcher} started {environment.world_size} processes of {PROGRAM}.",
            "It starts the processes of both sides itself.",
            f"Write {PROGRAM} JOB.py without a launcher; tm.verify_job is for processes that are there already.",
        )
