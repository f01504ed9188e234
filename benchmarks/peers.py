"""Trimaran's run against what else people train with: Accelerate, Lightning Fabric and Trainer, a loop by hand.

    python benchmarks/peers.py [--quick] [--only "gpt 2x1"] [--json build/peers.json]

The first time it makes an environment of its own in build/peers-venv, which takes minutes. A cell is a workload on one
process with two threads, or on two with one each: all contestants live in the same processes, and train the same model
from the same weights on the same batches. A round times a block of steps of each, in random order; a figure is the
median over rounds of their time / Trimaran's (above 1.00: Trimaran takes less), with a 95 % interval. "ahead" and
"behind" are said only where the interval excludes 1; wanted are lower ends of at least 0.97. What is equal and what is
not is told in peers/equal_loops.py; the second table runs the tools as their READMEs begin, peers/readme_loops.py.
Peak memory is that of fresh processes with one contestant each, the larger rank's. Exits 1 where the first losses of
the contestants part: the comparison is then void.
"""

from __future__ import annotations

import json as jsonlib
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from common.measuring import median_interval, write_record

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "peers"
VENV = ROOT / "build" / "peers-venv"
PYTHON = VENV / "bin" / "python"

WORKLOADS = ("gpt", "resnet", "text")
TRIMARAN, PEERS = "Trimaran", ("PyTorch", "Accelerate", "Fabric", "Trainer")
WANTED_LOW = 0.97
FEWEST_ROUNDS = 6
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Cell:
    """A workload on so many processes, each with so many threads."""

    workload: str
    num_procs: int
    num_threads: int

    def __str__(self) -> str:
        return f"{self.workload} {self.num_procs}x{self.num_threads}"


@dataclass(frozen=True)
class Timing:
    """A cell's seconds per step by contestant and round, those of the slowest rank, and how far the losses part."""

    cell: Cell
    use: str
    block_steps: int
    seconds: dict[str, list[float]]
    loss_difference: float | None

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, peer: str) -> list[float]:
        """Of each round: above 1 where Trimaran takes less time."""
        return [theirs / ours for theirs, ours in zip(self.seconds[peer], self.seconds[TRIMARAN], strict=True)]


def main(
    quick: bool = False,
    only: str = "",
    rounds: int = 10,
    block_seconds: float = 0.5,
    json: Path = Path("build/peers.json"),
) -> None:
    """Times Trimaran against other tools for the same work, weighs them, and writes the figures.

    Args:
        quick: a smoke run of one workload, one thread and two blocks of a single step, whose figures mean nothing.
        only: the cells whose names have all these words, such as "gpt 2x1".
        rounds: timed blocks of each contestant.
        block_seconds: how long a block takes, roughly.
        json: where the figures go.
    """
    cells = [Cell(workload, num_procs, 2 // num_procs) for workload in WORKLOADS for num_procs in (1, 2)]
    cells = [cell for cell in cells if set(only.split()) <= set(str(cell).split())]
    if quick:  # with one thread: two on a busy machine spend their time in waiting for each other
        cells = [replace(cell, num_threads=1) for cell in cells if cell.workload == cells[0].workload]
        rounds, block_seconds = 2, 0.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    began = time.monotonic()
    make_environment()
    with tempfile.TemporaryDirectory() as scratch:
        samples = Path(scratch)
        run([PYTHON, HERE / "prepare.py", samples], num_threads=1, log=samples / "log")
        timings, peaks = [], {}
        for cell in cells:
            for use in ("equal", "readme"):
                timings.append(time_cell(cell, use, samples, rounds, block_seconds))
            peaks[cell] = {name: measure_peak(cell, name, samples) for name in (TRIMARAN, *PEERS)}
            print(describe_briefly(timings[-2]), f"({time.monotonic() - began:.0f} s so far)", flush=True)
            write_figures(json, timings, peaks, seconds=time.monotonic() - began)
    print_tables(timings, peaks)
    void = [str(each.cell) for each in timings if each.use == "equal" and not differs_little(each)]
    if void:
        sys.exit(f"Void: the losses of the contestants part in {', '.join(void)}.")


# ── Processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def make_environment() -> None:
    """Installs the tools and this checkout into an environment of their own, unless they are there."""
    constraints = [ROOT / "constraints.txt", HERE / "constraints.txt"]
    wanted = "".join(path.read_text() for path in (*constraints, ROOT / "pyproject.toml"))
    stamp = VENV / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"making {VENV}", flush=True)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for path in constraints:
        install += ["-c", path]
    packages = ["torch==2.13.0", "accelerate", "lightning", "greenlet", "-e", f"{ROOT}[recipes]"]
    subprocess.run([*install, *packages], check=True)
    stamp.write_text(wanted)  # last, so that an interrupted install is done again


def time_cell(cell: Cell, use: str, samples: Path, rounds: int, block_seconds: float) -> Timing:
    """Times all contestants of a cell in one group of processes."""
    ranks = run_worker(cell, samples, use=use, rounds=rounds, block_seconds=block_seconds)
    names = list(ranks[0]["seconds"])
    return Timing(
        cell=cell,
        use=use,
        block_steps=ranks[0]["block_steps"],
        # A step takes as long as its slowest rank.
        seconds={
            name: [max(each) for each in zip(*(rank["seconds"][name] for rank in ranks), strict=True)] for name in names
        },
        loss_difference=largest_difference(ranks) if use == "equal" else None,
    )


def measure_peak(cell: Cell, name: str, samples: Path) -> int:
    """Bytes of the larger rank where this contestant makes a few steps alone, with the equal work."""
    return max(rank["peak_bytes"] for rank in run_worker(cell, samples, use="equal", alone=name))


def run_worker(cell: Cell, samples: Path, **options: Any) -> list[dict[str, Any]]:
    """What peers/worker.py wrote on each rank of a fresh group of processes."""
    folder = Path(tempfile.mkdtemp(dir=samples))
    (folder / f"{cell.workload}.safetensors").symlink_to(samples / f"{cell.workload}.safetensors")
    command: list[Any] = [PYTHON]
    if cell.num_procs > 1:
        command += ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", cell.num_procs]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += [HERE / "worker.py", "--workload", cell.workload, "--folder", folder]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", value]
    run(command, num_threads=cell.num_threads, log=folder / "log")
    figures = [jsonlib.loads((folder / f"rank{rank}.json").read_text()) for rank in range(cell.num_procs)]
    shutil.rmtree(folder)
    return figures


def run(command: Sequence[Any], *, num_threads: int, log: Path) -> None:
    """Runs a command without a GPU, with loopback alone, and shows what it wrote only where it fails."""
    settings = {
        "OMP_NUM_THREADS": str(num_threads),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, ROOT / "recipes"))),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    words = [str(word) for word in command]
    with log.open("w") as output:
        process = subprocess.Popen(words, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            process.terminate()  # where this script is stopped, so are the processes that it started
            process.wait()
    if code:
        sys.exit(f"{log.read_text()[-6000:]}\nexit code {code} of: {' '.join(words)}")


# ── Figures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def largest_difference(ranks: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative difference between a contestant's first losses and Trimaran's; infinite where one is NaN.

    A loss is the mean over the ranks: some report their rank's own, and ranks have equal shares.
    """
    losses = {
        name: [statistics.fmean(each) for each in zip(*(rank["losses"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["losses"]
    }
    pairs = [pair for name in PEERS for pair in zip(losses[name], losses[TRIMARAN], strict=True)]
    differences = [abs(theirs - ours) / abs(ours) for theirs, ours in pairs]
    return math.inf if any(math.isnan(each) for each in differences) else max(differences)


def differs_little(timing: Timing) -> bool:
    return timing.loss_difference is not None and timing.loss_difference <= LOSS_TOLERANCE


def verdict(ratios: Sequence[float]) -> str:
    """Which side Trimaran is on, where the interval excludes 1; with few rounds there is no interval of 95 %."""
    if len(ratios) < FEWEST_ROUNDS:
        return "not said"
    low, high = median_interval(ratios)
    if low > 1:
        return "ahead"
    return "behind" if high < 1 else "level"


def describe_briefly(timing: Timing) -> str:
    """ "gpt 2x1: PyTorch 1.002, Accelerate 1.013"."""
    return f"{timing.cell}: " + ", ".join(f"{peer} {statistics.median(timing.ratios(peer)):.3f}" for peer in PEERS)


def print_tables(timings: Sequence[Timing], peaks: Mapping[Cell, Mapping[str, int]]) -> None:
    """One table for each use; "!" marks a lower end below what is wanted."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    titles = {"equal": "The same work", "readme": "As each README begins (what they do differs)"}
    for use, title in titles.items():
        table = Table("cell", "against", "Trimaran ms", "theirs ms", "ratio", "95 %", "Trimaran is", title=title)
        if use == "equal":
            for column in ("Trimaran MiB", "theirs MiB"):
                table.add_column(column)
        for timing in (each for each in timings if each.use == use):
            for peer in PEERS:
                ratios = timing.ratios(peer)
                low, high = median_interval(ratios)
                row = [
                    str(timing.cell),
                    peer,
                    f"{timing.median(TRIMARAN) * 1e3:.1f}",
                    f"{timing.median(peer) * 1e3:.1f}",
                    f"{statistics.median(ratios):.3f}",
                    f"{low:.3f} to {high:.3f}",
                    verdict(ratios)
                    + (" !" if use == "equal" and low < WANTED_LOW and len(ratios) >= FEWEST_ROUNDS else ""),
                ]
                if use == "equal":
                    row += [f"{peaks[timing.cell][name] / 2**20:.0f}" for name in (TRIMARAN, peer)]
                table.add_row(*row, end_section=peer == PEERS[-1])
        console.print(table)


def write_figures(
    path: Path, timings: Sequence[Timing], peaks: Mapping[Cell, Mapping[str, int]], *, seconds: float
) -> None:
    """Writes the figures as JSON, with where and when they were taken."""
    cells = []
    for timing in timings:
        ratios = {peer: timing.ratios(peer) for peer in PEERS}
        cells.append(
            {"name": str(timing.cell)}
            | asdict(timing)
            | {
                "ratio": {peer: statistics.median(each) for peer, each in ratios.items()},
                "ratio_interval": {peer: median_interval(each) for peer, each in ratios.items()},
                "verdict": {peer: verdict(each) for peer, each in ratios.items()},
            }
        )
    write_record(
        path,
        {
            "seconds": round(seconds),
            "packages": installed_versions(),
            "cells": cells,
            "peak_bytes": {str(cell): each for cell, each in peaks.items()},
        },
    )


def installed_versions() -> dict[str, str]:
    listed = subprocess.run([PYTHON, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True).stdout
    wanted = {"torch", "accelerate", "lightning", "trimaran", "numpy"}
    return {each["name"]: each["version"] for each in jsonlib.loads(listed) if each["name"] in wanted}


if __name__ == "__main__":
    tyro.cli(main)
