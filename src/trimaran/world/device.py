"""Which device a rank computes on, what it is called, and how it is told to be exact."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

import torch

from trimaran.cluster import Chip, find_chip
from trimaran.errors import ClusterError
from trimaran.layout import Precision
from trimaran.options import Device
from trimaran.world.cache import cache_file

_CGROUP = Path("/sys/fs/cgroup")
_MUCH = 2**62
_CPU_RATES: tuple[Precision, ...] = ("fp64", "fp32", "bf16", "fp16")
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(wanted: Device, *, local_rank: int, num_procs: int) -> torch.device:
    """The device of this rank; auto takes cuda where there is one for each local rank, else the CPU.

    Raises ClusterError for a device this machine lacks, or has too few of.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        found = torch.cuda.device_count()
        if local_rank >= found:
            raise ClusterError(
                f"device=cuda, and local rank {local_rank} finds {found} GPUs here.",
                "Each process drives one GPU.",
                f"Use --procs {found}." if found else "Use --device cpu, or a torch build with CUDA.",
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise ClusterError("device=mps is not available here.", "It needs macOS on Apple silicon.", "Use cpu.")
        if num_procs > 1:
            raise ClusterError(
                f"device=mps with {num_procs} processes.",
                "No collective library of torch runs on mps.",
                "Use --procs 1, or --device cpu.",
            )
    return torch.device(wanted)


def set_numerics(*, precision: Precision, deterministic: bool) -> None:
    """Sets torch's process-wide switches: matrix precision, and only deterministic algorithms where asked."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def describe_device(device: torch.device) -> str:
    """The device's own name, such as "NVIDIA H200" or the processor's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: on the device, or on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_host_bytes() -> int:
    """Host memory that can still be taken without swapping: the machine's, or the container's where that is less.

    Where the system does not tell (not Linux), very much.
    """
    found = [_MUCH]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = (_CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text(encoding="utf-8"))
            cached = _cgroup_figure("inactive_file")
            found.append(int(limit) - used + cached)
    except (OSError, ValueError, IndexError):
        pass
    return max(0, min(found))


def _cgroup_figure(name: str) -> int:
    for line in (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def find_local_chip(device: torch.device, precision: Precision) -> Chip | None:
    """This rank's chip with its peak rate: from the hardware table, or on a CPU measured once and cached."""
    if device.type == "cuda":
        return find_chip(torch.cuda.get_device_name(device))
    if device.type == "cpu" and precision in _CPU_RATES:
        threads = torch.get_num_threads()
        name = f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"
        return Chip(name, {precision: _cached_cpu_rate(precision, threads)}, "measured here")
    return None


def _cached_cpu_rate(precision: Precision, threads: int) -> float:
    """Best FLOP/s of a square matrix product with this many threads, measured once per machine, torch and precision."""
    cache = cache_file("cpu-rates.json")
    key = f"{_cpu_name()} | torch {torch.__version__} | {threads} threads | {precision}"
    known = _read_cpu_rates(cache)
    if known.get(key, 0.0) > 0:
        return known[key]
    rate = _measure_matmul_rate(_DTYPES[precision])
    known[key] = rate
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(cache)
    except OSError:
        pass  # a machine without a writable home measures again next time
    return rate


def _read_cpu_rates(cache: Path) -> dict[str, float]:
    """What earlier runs measured; what cannot be read counts as not measured."""
    try:
        return {str(key): float(rate) for key, rate in json.loads(cache.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _measure_matmul_rate(dtype: torch.dtype, size: int = 512, seconds: float = 0.2) -> float:
    a = torch.ones(size, size, dtype=dtype)
    a @ a
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
