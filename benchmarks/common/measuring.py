"""What several benchmarks measure with: functions on ranks of fresh processes, an interval of a median, a record."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def run_ranks(function: Callable[..., Any], num_procs: int, *arguments: Any) -> list[Any]:
    """What `function(rank, store, *arguments)` returns on each rank, in fresh processes.

    `store` is the path of a file at which the ranks can meet. Functions and arguments must be of a module's top level.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(num_procs, mp_context=context) as pool:
        store = str(Path(directory) / "store")
        futures = [pool.submit(function, rank, store, *arguments) for rank in range(num_procs)]
        return [future.result() for future in futures]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics that holds the median with at least this confidence.

    The k-th smallest and largest of n miss it with probability 2 P(Binomial(n, 1/2) < k). With fewer than 6 values
    no pair reaches 95 %: the extremes are then returned.
    """
    ordered, num_values = sorted(values), len(values)
    depth, missed = 0, 2 * 0.5**num_values
    while missed <= 1 - confidence:
        depth += 1
        missed += 2 * math.comb(num_values, depth) * 0.5**num_values
    depth = max(depth, 1)
    return ordered[depth - 1], ordered[-depth]


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Processes started inside hand freed blocks of 64 KiB and more back to the system at once (glibc only).

    Left to itself the allocator keeps some of them: the peak of the same program then differs by tens of MiB.
    """
    before = os.environ.get(_THRESHOLD)
    os.environ[_THRESHOLD] = str(64 * 1024)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THRESHOLD]
        else:
            os.environ[_THRESHOLD] = before


def peak_resident_bytes() -> int:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_record(path: Path, figures: Mapping[str, Any]) -> None:
    """Writes the figures as JSON, with where and when they were taken."""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | dict(figures), indent=1) + "\n")
