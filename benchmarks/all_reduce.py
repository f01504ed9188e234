"""What an all-reduce costs on this machine, by size: `python benchmarks/all_reduce.py [--procs 2]`.

Prints each size's median time over repeated sums and its bus bandwidth, 2 (N - 1) / N · bytes / time, which is what the
slowest link carried. For docs/concepts/all-reduce.md; gloo on loopback, one thread per process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES_BYTES = [4 * 2**exponent for exponent in range(0, 25, 3)]
REPEATS = 15


def measure(rank: int, num_procs: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_procs)
    if rank == 0:
        print(f"{'size':>12} {'time':>12} {'bus bandwidth':>14}   gloo, {num_procs} processes")
    for size in SIZES_BYTES:
        tensor = torch.ones(size // 4)
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[3:])
        if rank == 0:
            bandwidth = 2 * (num_procs - 1) / num_procs * size / median
            print(f"{size:>10} B {1e3 * median:>9.3f} ms {bandwidth / 1e9:>9.3f} GB/s")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--procs", type=int, default=2)
    num_procs = parser.parse_args().procs
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(num_procs, str(Path(folder) / "store")), nprocs=num_procs)


if __name__ == "__main__":
    main()
