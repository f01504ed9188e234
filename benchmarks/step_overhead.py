"""engine.step against the best hand-written PyTorch loop for the same work: time in alternating pairs, peak memory.

    python benchmarks/step_overhead.py [--quick] [--only "mlp bf16"] [--json build/step_overhead.json]

Both sides live in the same processes, train the same model from the same weights on the same batches, and report the
loss of the world and the gradient norm of each step, one step late. A round times a block of steps of each side, in
random order, and gives a ratio hand-written time / engine time (1.00: equal, wanted: at least 0.98). Where the
allocator happens to put a side's tensors shifts its speed by percents for as long as the process lives, so each cell
is launched several times: its figure is the median over launches of the median over rounds, with an interval of the
former. In several processes the hand-written side is DDP twice, with and without gradient_as_bucket_view; the engine
is held against the faster for time and the smaller for memory. Peak memory is that of fresh processes that run one
side alone, with freed blocks returned to the system at once: what the side holds, without what the allocator keeps.
Exits 1 where the losses of the sides part: the comparison is void.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from common.measuring import freed_memory_returned, median_interval, peak_resident_bytes, run_ranks, write_record
from common.step_sides import ENGINE, NUM_BATCHES, WORKLOADS, Cell, Side, build_sides

WANTED_RATIO = 0.98
NUM_COMPARED_STEPS = 5
LOSS_TOLERANCE = 1e-4
MEMORY_TOLERANCE = 0.005
"""Repeats of one side differ by less."""


@dataclass(frozen=True)
class Outcome:
    """A cell's figures; a ratio is hand-written time / engine time, against `rival`: the median of one launch."""

    cell: Cell
    rival: str
    ratio: float
    ratio_low: float
    ratio_high: float
    step_seconds: dict[str, float]
    peak_bytes: dict[str, int]
    loss_difference: float
    ratios: list[float]

    @property
    def smallest_rival_bytes(self) -> int:
        return min(size for name, size in self.peak_bytes.items() if name != ENGINE)


def main(
    quick: bool = False,
    only: str = "",
    launches: int = 7,
    rounds: int = 6,
    block_steps: int = 2,
    json: Path = Path("build/step_overhead.json"),
) -> None:
    """Times engine.step against a hand-written loop, compares their peak memory, and writes the figures.

    Args:
        quick: a smoke run of two cells, launched once, whose figures mean little.
        only: the cells whose names have all these words, such as "mlp bf16 2x1".
        launches: how often each cell is started anew.
        rounds: timed rounds of a launch.
        block_steps: steps of each side in a round.
        json: where the figures go.
    """
    cells = [cell for cell in all_cells() if set(only.split()) <= set(str(cell).split())]
    if not cells:
        sys.exit(f"No cell is named {only!r}. There are: {', '.join(map(str, all_cells()))}.")
    if quick:
        cells, launches, rounds, block_steps = [cells[0], *cells[1:][-1:]], 1, 3, 1
    outcomes = []
    for cell in cells:
        outcomes.append(compare(cell, launches, rounds, block_steps))
        print(f"{cell}  {outcomes[-1].ratio:.3f}", flush=True)
    print_table(outcomes)
    write_record(json, {"cells": [asdict(each) for each in outcomes]})
    void = [str(each.cell) for each in outcomes if not each.loss_difference <= LOSS_TOLERANCE]
    if void:
        sys.exit(f"Void: the losses of the sides part in {'; '.join(void)}.")


def all_cells() -> list[Cell]:
    """Both workloads at both precisions, in one process on two threads and in two on one, whole and in four pieces."""
    return [
        Cell(workload, precision, num_procs, 2 // num_procs, accumulation)
        for workload in WORKLOADS
        for precision in ("fp32", "bf16")
        for num_procs in (1, 2)
        for accumulation in (1, 4)
    ]


def compare(cell: Cell, num_launches: int, num_rounds: int, block_steps: int) -> Outcome:
    """Times and weighs the sides of a cell."""
    differences: list[float] = []
    launches: list[dict[str, list[float]]] = []
    for launch in range(num_launches):
        ranks = run_ranks(time_sides, cell.num_procs, cell, launch, num_rounds, block_steps)
        differences += [loss_difference(rank["losses"]) for rank in ranks]
        launches.append({name: _slowest([rank["seconds"][name] for rank in ranks]) for name in [ENGINE, *cell.rivals]})
    step_seconds = {
        name: statistics.median(statistics.median(each[name]) for each in launches) for name in [ENGINE, *cell.rivals]
    }
    rival = min(cell.rivals, key=lambda name: step_seconds[name])
    ratios = [median_ratio(each[rival], each[ENGINE]) for each in launches]
    low, high = median_interval(ratios)
    return Outcome(
        cell=cell,
        rival=rival,
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        step_seconds=step_seconds,
        peak_bytes={name: _largest_peak(cell, name) for name in [ENGINE, *cell.rivals]},
        loss_difference=max(differences),
        ratios=ratios,
    )


def time_sides(rank: int, store: str, cell: Cell, launch: int, num_rounds: int, block_steps: int) -> dict[str, Any]:
    """On each rank: the first losses of each side, then its seconds per step in each round."""
    draw = random.Random(launch)  # the same order on every rank
    names = draw.sample([ENGINE, *cell.rivals], 1 + len(cell.rivals))
    sides = build_sides(cell, rank, store, names)
    losses = {name: _first_losses(side) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    next_step = NUM_COMPARED_STEPS + 1
    gc.disable()  # garbage is collected between the blocks, so that no side pays for the other's
    for _ in range(num_rounds + 1):
        for name in draw.sample(names, len(names)):
            gc.collect()
            seconds[name].append(_time_block(sides[name], next_step, block_steps) / block_steps)
        next_step += block_steps
    _leave()
    return {"losses": losses, "seconds": {name: each[1:] for name, each in seconds.items()}}


def peak_of_side(rank: int, store: str, cell: Cell, name: str) -> int:
    """On each rank: the peak of a process that builds and steps this side alone."""
    side = build_sides(cell, rank, store, [name])[name]
    for index in range(NUM_BATCHES):
        side.step(index)
    _leave()
    return peak_resident_bytes()


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


def loss_difference(losses: Mapping[str, Sequence[float]]) -> float:
    """The largest relative difference between a side's first losses and the engine's; infinite where one is NaN."""
    pairs = [pair for each in losses.values() for pair in zip(each, losses[ENGINE], strict=True)]
    differences = [abs(theirs - ours) / abs(ours) for theirs, ours in pairs]
    return math.inf if any(math.isnan(each) for each in differences) else max(differences)


def print_table(outcomes: Sequence[Outcome], *, wanted: float = WANTED_RATIO) -> None:
    """One line for each cell; "!" marks what misses its aim."""
    table = Table(
        "cell", "against", "engine ms", "theirs ms", "ratio", "95 %", "engine MiB", "theirs MiB", "loss differs"
    )
    for each in outcomes:
        slower = "" if each.ratio >= wanted else " !"
        larger = " !" if each.peak_bytes[ENGINE] > each.smallest_rival_bytes * (1 + MEMORY_TOLERANCE) else ""
        table.add_row(
            str(each.cell),
            each.rival,
            f"{each.step_seconds[ENGINE] * 1e3:.1f}",
            f"{each.step_seconds[each.rival] * 1e3:.1f}",
            f"{each.ratio:.3f}{slower}",
            f"{each.ratio_low:.3f} to {each.ratio_high:.3f}",
            f"{each.peak_bytes[ENGINE] / 2**20:.1f}{larger}",
            f"{each.smallest_rival_bytes / 2**20:.1f}",
            f"{each.loss_difference:.0e}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each round; a step takes as long as its slowest rank."""
    return [max(each) for each in zip(*ranks, strict=True)]


def _largest_peak(cell: Cell, name: str) -> int:
    with freed_memory_returned():
        return max(run_ranks(peak_of_side, cell.num_procs, cell, name))


def _first_losses(side: Side) -> list[float]:
    figures = [side.step(index) for index in range(NUM_COMPARED_STEPS + 1)]
    return [loss for loss, _norm in filter(None, figures)]


def _time_block(side: Side, first_step: int, num_steps: int) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for index in range(first_step, first_step + num_steps):
        side.step(index)
    return time.perf_counter() - began


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main)
