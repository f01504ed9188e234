"""Saving and loading a checkpoint: how long training waits, and how much of the disk's speed is used.

    python benchmarks/checkpoint.py [--quick] [--mib 768] [--json build/checkpoint.json]

The state is a stack of linear layers in float32 with AdamW's moments, the same in every process. Three sides save and
load it: Trimaran, which makes and checks a SHA-256 of every file, and torch.distributed.checkpoint used plainly, with
its default writer and with its safetensors writer, which make none. Beside them `dd` writes as many random bytes to the
same disk with conv=fsync, and reads them back. In each round every figure is taken once, in random order; ratios are
those of one round, and the table has their medians. Before anything is read, the page cache of its files is dropped.
The first round is cold (buffers are allocated in it) and told apart; the others are warm.

    stall     seconds until an asynchronous save lets training go on, over a blocking save's (wanted: at most 0.10)
    write     bytes per second of a blocking save over dd's (wanted: at least 0.8), with fsync on both sides
    load      bytes per second of a whole load into model and optimizer over dd's plain reading (wanted: at least 0.8)
    lost      seconds of matrix products in the foreground that an asynchronous save costs in all: its stall, and what
              writing in the background takes from them
    memory    of one process, over what it held before: its peak while it saves asynchronously for the first time

Exits 1 where a side does not give back what was saved: the comparison is void.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from common.checkpoint_sides import OURS, SIDES, Cell, Side, State, build_side
from common.measuring import median_interval, run_ranks, write_record
from trimaran.world.device import available_host_bytes

WANTED_STALL = 0.10
WANTED_RATE = 0.8
BLOCK = "8M"

Seconds = dict[str, float]
"""By what was timed: "write dd", "save trimaran", "stall trimaran", "load trimaran", … of one round."""


@dataclass(frozen=True)
class Outcome:
    """A cell's figures. `rounds` has the seconds of each, the first cold; memory in bytes per process."""

    cell: Cell
    num_bytes: int
    rounds: list[Seconds]
    lost: dict[str, float]
    peak_bytes: dict[str, int]
    taken_bytes: dict[str, int]

    def ratio(self, over: str, under: str) -> list[float]:
        """One figure over another, in each warm round."""
        return [each[over] / each[under] for each in self.rounds[1:] or self.rounds]

    def median(self, figure: str) -> float:
        return statistics.median(each[figure] for each in self.rounds[1:] or self.rounds)


def main(
    quick: bool = False,
    mib: int = 768,
    rounds: int = 9,
    only: str = "",
    folder: Path = Path("build"),
    json: Path = Path("build/checkpoint.json"),
) -> None:
    """Times saving and loading of a checkpoint against torch.distributed.checkpoint and the disk.

    Args:
        quick: a smoke run of little state, whose figures mean little.
        mib: size of the state.
        rounds: how often each figure is taken, after the cold round.
        only: the cells whose names have all these words, such as "2 procs".
        folder: on the disk to be measured.
        json: where the figures go.
    """
    if quick:
        mib, rounds = min(mib, 64), 1
    cells = [Cell(num_procs, mib * 2**20) for num_procs in (1, 2)]
    cells = [cell for cell in cells if set(only.split()) <= set(str(cell).split())]
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for cell in cells:
        with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-") as place, random_bytes(cell) as source:
            outcomes.append(measure(cell, Path(place), source, rounds))
        print(describe(outcomes[-1]), flush=True)
    print_table(outcomes)
    write_record(json, {"cells": [asdict(each) for each in outcomes]})


def measure(cell: Cell, place: Path, source: Path, num_rounds: int) -> Outcome:
    """All figures of a cell; sides are timed in one set of processes, and weighed alone in fresh ones."""
    ranks = run_ranks(time_sides, cell.num_procs, cell, str(place), str(source), num_rounds)
    if not all(rank["same"] for rank in ranks):
        sys.exit(f"Void: in {cell} what was loaded is not what was saved.")
    rounds = [{name: max(each[name] for each in of_ranks) for name in of_ranks[0]} for of_ranks in _by_round(ranks)]
    weighed = {name: run_ranks(weigh_side, cell.num_procs, cell, str(place), name) for name in SIDES}
    return Outcome(
        cell=cell,
        num_bytes=ranks[0]["num_bytes"],
        rounds=rounds,
        lost={name: max(rank["lost"][name] for rank in ranks) for name in SIDES},
        peak_bytes={name: max(rank["peak"] for rank in each) for name, each in weighed.items()},
        taken_bytes={name: max(rank["taken"] for rank in each) for name, each in weighed.items()},
    )


def time_sides(rank: int, store: str, cell: Cell, place: str, source: str, num_rounds: int) -> dict[str, Any]:
    """On each rank: whether all sides give back what they saved, and the seconds of each round."""
    state = State(cell, rank, store)
    sides = {name: build_side(name, state, Path(place) / name.replace(" ", "-")) for name in SIDES}
    file = Path(place) / "dd"
    draw = random.Random(0)  # the same order on every rank
    rounds: list[Seconds] = []
    gc.disable()
    for _ in range(num_rounds + 1):
        seconds: Seconds = {}
        for name in draw.sample(["dd", *SIDES], 1 + len(SIDES)):
            gc.collect()
            seconds |= time_dd(rank, file, source) if name == "dd" else time_side(rank, name, sides[name], draw)
        rounds.append(seconds)
    lost = {name: lose(rank, side) for name, side in sides.items()}
    same = all(gives_back(rank, side) for side in sides.values())
    found = {"same": same, "num_bytes": state.num_bytes, "rounds": rounds, "lost": lost}
    dist.destroy_process_group()
    return found


def time_side(rank: int, name: str, side: Side, draw: random.Random) -> Seconds:
    """Seconds of a blocking save, of the stall of an asynchronous one and of all of it, and of a load of either."""
    seconds: Seconds = {}
    for way in draw.sample(["save", "begin"], 2):
        _clear(rank, side)
        began = time.perf_counter()
        if way == "save":
            side.save()
            seconds[f"save {name}"] = time.perf_counter() - began
        else:
            wait = side.begin()
            seconds[f"stall {name}"] = time.perf_counter() - began
            wait()
            seconds[f"behind {name}"] = time.perf_counter() - began
    _drop_cache(rank, side.saved)
    began = time.perf_counter()
    side.load()
    seconds[f"load {name}"] = time.perf_counter() - began
    dist.barrier()
    began = time.perf_counter()
    side.load()
    seconds[f"load {name} cached"] = time.perf_counter() - began
    _clear(rank, side)
    return seconds


def time_dd(rank: int, file: Path, source: str) -> Seconds:
    """Seconds in which rank 0 writes and reads as many bytes with dd, while the others wait."""
    seconds = {"write dd": 0.0, "read dd": 0.0}
    _settle(rank)
    if rank == 0:
        began = time.perf_counter()
        _dd(f"if={source}", f"of={file}", "conv=fsync")
        seconds["write dd"] = time.perf_counter() - began
    _drop_cache(rank, file)
    if rank == 0:
        began = time.perf_counter()
        _dd(f"if={file}", "of=/dev/null")
        seconds["read dd"] = time.perf_counter() - began
        file.unlink()
    dist.barrier()
    return seconds


def lose(rank: int, side: Side, repeats: int = 3) -> float:
    """Seconds of matrix products that an asynchronous save costs, from its call to its end; the median of some."""
    matrix = torch.randn(512, 512)

    def products(until: Callable[[], bool]) -> int:
        count = 0
        while not until():
            torch.mm(matrix, matrix)
            count += 1
        return count

    lost = []
    for _ in range(repeats):
        _clear(rank, side)
        began = time.perf_counter()
        alone = products(lambda began=began: time.perf_counter() - began > 1.0)  # type: ignore[misc]
        dist.barrier()
        began, written = time.perf_counter(), threading.Event()
        wait = side.begin()
        waiter = threading.Thread(target=lambda wait=wait, written=written: (wait(), written.set()))
        waiter.start()
        beside = products(written.is_set)
        lost.append(time.perf_counter() - began - beside / alone)
        waiter.join()
    _clear(rank, side)
    return statistics.median(lost)


def gives_back(rank: int, side: Side) -> bool:
    """Whether a save and a load bring the state back, after all of it was erased."""
    before = side.state.digest()
    side.begin()()
    dist.barrier()
    side.state.erase()
    side.load()
    _clear(rank, side)
    return side.state.digest() == before and any(before)


def weigh_side(rank: int, store: str, cell: Cell, place: str, name: str) -> dict[str, int]:
    """On each rank: what a first asynchronous save takes beyond what the process holds, and takes from the machine."""
    side = build_side(name, State(cell, rank, store), Path(place) / "weighed")
    _clear(rank, side)
    gc.collect()
    held, available = _resident("VmRSS"), available_host_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    with _lowest_memory() as lowest:
        side.begin()()
    found = {"peak": _resident("VmHWM") - held, "taken": available - min(lowest)}
    dist.barrier()
    _clear(rank, side)
    dist.destroy_process_group()
    return found


def describe(outcome: Outcome) -> str:
    """The cell in a line, for whoever waits for the rest."""
    stall = statistics.median(outcome.ratio(f"stall {OURS}", f"save {OURS}"))
    write = statistics.median(outcome.ratio("write dd", f"save {OURS}"))
    return f"{outcome.cell}  stall {stall:.3f}  write {write:.2f} of the disk"


def print_table(outcomes: Sequence[Outcome]) -> None:
    """A line for each cell and side; "!" marks what misses its aim."""
    columns = "cell", "side", "stall ms", "cold", "save s", "stall/save", "MB/s", "of dd", "load s", "cached", "of dd"
    table = Table(*columns, "lost s", "peak MiB", "taken MiB")
    for outcome in outcomes:
        for name in SIDES:
            table.add_row(*_row(outcome, name))
        dd = [outcome.num_bytes / outcome.median(each) / 1e6 for each in ("write dd", "read dd")]
        table.add_row(str(outcome.cell), "dd", "", "", f"{outcome.median('write dd'):.2f}", "", f"{dd[0]:.0f}", "",
                      f"{outcome.median('read dd'):.2f}", "", f"{dd[1]:.0f} MB/s", end_section=True)  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 190).print(table)


def _row(outcome: Outcome, name: str) -> list[str]:
    stall = outcome.ratio(f"stall {name}", f"save {name}")
    write, load = outcome.ratio("write dd", f"save {name}"), outcome.ratio("read dd", f"load {name}")
    return [
        str(outcome.cell),
        name,
        f"{1e3 * outcome.median(f'stall {name}'):.0f}",
        f"{1e3 * outcome.rounds[0][f'stall {name}']:.0f}",
        f"{outcome.median(f'save {name}'):.2f}",
        _figure(stall, statistics.median(stall) > WANTED_STALL and name == OURS, digits=3),
        f"{outcome.num_bytes / outcome.median(f'save {name}') / 1e6:.0f}",
        _figure(write, statistics.median(write) < WANTED_RATE and name == OURS),
        f"{outcome.median(f'load {name}'):.2f}",
        f"{outcome.median(f'load {name} cached'):.2f}",
        _figure(load, statistics.median(load) < WANTED_RATE and name == OURS),
        f"{outcome.lost[name]:.2f}",
        f"{outcome.peak_bytes[name] / 2**20:.0f}",
        f"{outcome.taken_bytes[name] / 2**20:.0f}",
    ]


def _figure(ratios: Sequence[float], misses: bool, digits: int = 2) -> str:
    low, high = median_interval(ratios)
    spread = f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{statistics.median(ratios):.{digits}f}{spread}{' !' if misses else ''}"


@contextlib.contextmanager
def random_bytes(cell: Cell) -> Iterator[Path]:
    """A file in memory with as many random bytes as the cell has, for dd to copy from."""
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        path = Path(directory) / "random"
        with path.open("wb") as file:
            for _ in range(cell.num_bytes // 2**20):
                file.write(random.randbytes(2**20))
        yield path


@contextlib.contextmanager
def _lowest_memory() -> Iterator[list[int]]:
    """The machine's free memory, looked at every few milliseconds while inside."""
    found, ended = [available_host_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            found.append(available_host_bytes())

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield found
    finally:
        ended.set()
        looker.join()


def _resident(name: str) -> int:
    """Memory that this process holds (VmRSS), or has held at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name}")


def _by_round(ranks: Sequence[dict[str, Any]]) -> Iterator[tuple[Seconds, ...]]:
    return zip(*(rank["rounds"] for rank in ranks), strict=True)


def _clear(rank: int, side: Side) -> None:
    dist.barrier()
    if rank == 0:
        side.clear()
    _settle(rank)


def _settle(rank: int) -> None:
    """Nothing of what came before is left to be written, and all begin together."""
    if rank == 0:
        os.sync()
    dist.barrier()


def _drop_cache(rank: int, path: Path) -> None:
    """Makes the next reading one from the disk."""
    dist.barrier()
    if rank == 0:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def _dd(*words: str) -> None:
    dd = shutil.which("dd")
    assert dd is not None, "dd is not installed"
    subprocess.run([dd, f"bs={BLOCK}", *words], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    tyro.cli(main)
