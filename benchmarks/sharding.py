"""Sharded data parallelism against bare FSDP2 loops for the same work: time in alternating pairs, peak memory.

    python benchmarks/sharding.py [--quick] [--only "gpt zero3"] [--json build/sharding.json]

On two processes of one thread each, ZeRO 1, 2 and 3, whole and in four micro-batches. How a pair is timed is told in
step_overhead.py; wanted is a ratio of at least 0.97. Beside the peaks of whole processes stands what the formula of
docs/concepts/zero.md gives for parameters, gradients and optimizer state. Exits 1 where the losses of the sides part.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tyro

from common.measuring import write_record
from common.step_sides import WORKLOADS, Cell
from step_overhead import LOSS_TOLERANCE, Outcome, compare, print_table

WANTED_RATIO = 0.97


def main(
    quick: bool = False,
    only: str = "",
    launches: int = 5,
    rounds: int = 6,
    block_steps: int = 2,
    json: Path = Path("build/sharding.json"),
) -> None:
    """Times sharded steps against bare FSDP2, compares their peak memory, and writes the figures.

    Args:
        quick: a smoke run of one cell, launched once, whose figures mean little.
        only: the cells whose names have all these words, such as "gpt zero3".
        launches: how often each cell is started anew.
        rounds: timed rounds of a launch.
        block_steps: steps of each side in a round.
        json: where the figures go.
    """
    cells = [cell for cell in all_cells() if set(only.split()) <= set(str(cell).split())]
    if not cells:
        sys.exit(f"No cell is named {only!r}. There are: {', '.join(map(str, all_cells()))}.")
    if quick:
        cells, launches, rounds, block_steps = cells[:1], 1, 3, 1
    outcomes = []
    for cell in cells:
        outcomes.append(compare(cell, launches, rounds, block_steps))
        print(f"{cell}  {outcomes[-1].ratio:.3f}", flush=True)
    print_table(outcomes, wanted=WANTED_RATIO)
    print_formula(outcomes)
    write_record(json, {"cells": [asdict(each) for each in outcomes]})
    void = [str(each.cell) for each in outcomes if not each.loss_difference <= LOSS_TOLERANCE]
    if void:
        sys.exit(f"Void: the losses of the sides part in {'; '.join(void)}.")


def all_cells() -> list[Cell]:
    """Both workloads in fp32 at each stage, whole and in four pieces."""
    return [
        Cell(workload, "fp32", 2, 1, pieces, zero) for workload in WORKLOADS for zero in (1, 2, 3) for pieces in (1, 4)
    ]


def print_formula(outcomes: Sequence[Outcome]) -> None:
    """Bytes of parameters, gradients and state by the formula, in the middle of a step's accumulation."""
    for each in outcomes:
        whole, cut = {1: (8, 12), 2: (4, 16), 3: (0, 16)}[each.cell.zero]  # bytes per parameter
        num_parameters = sum(parameter.numel() for parameter in WORKLOADS[each.cell.workload].model().parameters())
        size = num_parameters * (whole + cut / each.cell.num_procs)
        print(f"{each.cell}: {size / 2**20:.1f} MiB of parameters, gradients and optimizer state in mid-accumulation")


if __name__ == "__main__":
    tyro.cli(main)
