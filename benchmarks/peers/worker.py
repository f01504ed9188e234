"""One process of a group: all contestants live in it, and take their turns block by block; or one lives there alone.

Contestants share the process group. They do not disturb one another: each has its own model and its own wrapper, and a
wrapper talks only in its own steps, in an order drawn alike on all ranks.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import equal_loops
import readme_loops
import torch
import torch.distributed as dist
import tyro
from pacing import Pace
from safetensors.torch import load_file
from workloads import NUM_BATCHES, SEED, WORKLOADS, Work

from common.measuring import peak_resident_bytes

NUM_COMPARED_STEPS = 5
LOOPS = {"equal": equal_loops.LOOPS, "readme": readme_loops.LOOPS}


def main(
    workload: str,
    use: Literal["equal", "readme"],
    folder: Path,
    rounds: int = 10,
    block_seconds: float = 0.5,
    alone: str = "",
) -> None:
    """Writes into `folder` what this rank measured: seconds per step of each contestant, or the peak memory of one."""
    num_procs = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    work = Work(WORKLOADS[workload], load_file(folder / f"{workload}.safetensors"), rank, num_procs, folder)
    loops = LOOPS[use]
    figures = measure_memory(loops[alone], work) if alone else measure_time(loops, work, rounds, block_seconds)
    (folder / f"rank{rank}.json").write_text(json.dumps(figures))
    # Nothing of what the tools do at their ends is of interest, and not all of it ends.
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


def measure_time(loops: dict[str, Any], work: Work, num_rounds: int, block_seconds: float) -> dict[str, Any]:
    """The first losses of each contestant, and its seconds per step in each round."""
    num_threads = torch.get_num_threads()
    paces: dict[str, Pace] = {}
    for name, loop in loops.items():  # Trimaran first: it opens the process group, the others find it
        paces[name] = Pace(partial(loop, work))
        paces[name].run_steps(NUM_COMPARED_STEPS + 1)
    # Tools take a signal as a request to leave at their step's edge, which they do not reach here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    assert torch.get_num_threads() == num_threads, "a contestant has changed the number of threads"
    block_steps = choose_block_steps(paces["Trimaran"], block_seconds)
    seconds: dict[str, list[float]] = {name: [] for name in paces}
    draw = random.Random(SEED)  # the same order on every rank
    gc.disable()  # garbage is collected between the blocks, so that nobody pays for another's
    for _ in range(num_rounds + 1):
        for name in draw.sample(list(paces), len(paces)):
            gc.collect()
            seconds[name].append(time_block(paces[name], block_steps) / block_steps)
    return {
        "block_steps": block_steps,
        "losses": {name: pace.losses[:NUM_COMPARED_STEPS] for name, pace in paces.items()},
        "seconds": {name: each[1:] for name, each in seconds.items()},  # the first block warms up
    }


def measure_memory(loop: Any, work: Work) -> dict[str, Any]:
    """The peak of a process in which one contestant makes a few steps."""
    if work.num_procs > 1 and loop is not equal_loops.train_with_trimaran:
        dist.init_process_group("gloo")
    Pace(partial(loop, work)).run_steps(NUM_BATCHES)
    return {"peak_bytes": peak_resident_bytes()}


def choose_block_steps(pace: Pace, block_seconds: float) -> int:
    """Steps that take so long, the same number on every rank."""
    steps = torch.tensor(max(1, math.ceil(block_seconds / (time_block(pace, 3) / 3))))
    if dist.is_initialized():
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return int(steps)


def time_block(pace: Pace, num_steps: int) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    pace.run_steps(num_steps)
    return time.perf_counter() - began


if __name__ == "__main__":
    tyro.cli(main)
