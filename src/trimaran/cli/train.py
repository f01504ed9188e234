"""`trimaran train JOB`: trains a job here, on one process or on several."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from trimaran.cli.flags import parse_verb, parse_with_job
from trimaran.cli.job_file import call_job_function, load_job_function, require_job_first
from trimaran.errors import UsageError
from trimaran.layout import Layout
from trimaran.options import RunOptions
from trimaran.world.environment import WorkerEnvironment, discover
from trimaran.world.workers import start_workers

STOPPED_AFTER_SAVING = 75
_PROGRAM = "trimaran train"


@dataclass(frozen=True)
class Train:
    """Train a job. The job file comes first; the arguments of its job() are flags too: trimaran train JOB --help."""

    job: tyro.conf.Positional[Path]
    """The job file: Python, with a function job() that returns a trimaran.Job."""
    procs: int | None = None
    """Processes to start on this machine, one per device; without it one, or those torchrun or srun started."""
    layout: str = ""
    """How the job is spread, such as "dp=2 micro_batch=8 precision=bf16"."""
    run: Path | None = None
    """The run's directory; without it a new one under runs/."""
    fork: str | None = None
    """Begin from another run's whole state, changed as this command says: RUN, or RUN@step."""
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Begin from another run's weights alone: RUN, or RUN@step."""
    steps: int | None = None
    """Optimizer steps, in place of the job's own length."""
    seed: int | None = None
    """Seed of weights, order and randomness, in place of the job's own."""
    global_batch: int | None = None
    """Samples of one optimizer step over all processes, in place of the job's own."""
    port: int | None = None
    """Port on loopback at which started processes meet; without it a free one."""
    traceback: bool = False
    """Show the whole Python traceback of an error."""
    options: Annotated[RunOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")] = field(
        default_factory=RunOptions
    )

    def __post_init__(self) -> None:
        if self.procs is not None and self.procs < 1:
            raise UsageError(f"--procs {self.procs}.", "It counts processes.", "Give 1 or more.")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UsageError(
                f"--port {self.port}.", "Ports are numbered from 1 to 65535.", "Give one, or leave it out."
            )
        if self.run is not None and not self.run.name:
            raise UsageError(
                f"--run {str(self.run)!r} names no directory of its own.",
                "A run keeps its records in a directory of its own.",
                "Give a name such as runs/a, or leave --run out.",
            )


def main(words: Sequence[str]) -> int:
    """Starts the workers and waits for them, or, as a worker or alone, trains. Returns the exit code."""
    require_job_first(words, _PROGRAM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save has nothing to save yet
    environment = discover()
    if environment is not None:
        # One of several: Ctrl-C before the first step ends it even where it waits for the others in compiled code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    own = list(words[: words.index("--")] if "--" in words else words)
    asks_for_job_help = len(own) > 1 and any(word in ("-h", "--help") for word in own[1:])
    command = None if asks_for_job_help else parse_verb(Train, own, program=_PROGRAM)
    if command is not None:
        Layout.parse(command.layout)  # a wrong layout is told before anything starts
        if command.procs not in (None, 1) and environment is None:
            # -P: as for the command itself, the current folder is not imported from.
            worker = [sys.executable, "-P", "-m", "trimaran", "train", *words]
            return start_workers(worker, num_procs=command.procs, port=command.port)
    return _train(words, environment)


def _train(words: Sequence[str], environment: WorkerEnvironment | None) -> int:
    path = Path(words[0])
    function = load_job_function(path)
    command, arguments = parse_with_job(Train, function, words, program=f"{_PROGRAM} {path}")
    from trimaran.run import Origin, train

    if environment is not None and command.procs not in (None, environment.world_size):
        raise UsageError(
            f"--procs {command.procs}, and {environment.launcher} started {environment.world_size} processes.",
            "Processes are started once, by the launcher or by --procs.",
            "Leave --procs out.",
        )
    job = call_job_function(function, arguments, path)
    job = job.with_overrides(steps=command.steps, seed=command.seed, global_batch=command.global_batch)
    finished = train(
        job,
        command.layout,
        run=command.run,
        options=command.options,
        origin=Origin(path, arguments),
        fork=command.fork,
        weights_from=command.from_,
    )
    return STOPPED_AFTER_SAVING if finished.stopped else 0
