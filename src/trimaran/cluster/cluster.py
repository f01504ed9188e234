"""Chips and nodes, as far as a run's own printout needs them: the peak rate behind "mfu 41 %"."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from trimaran.errors import ClusterError


@dataclass(frozen=True)
class Chip:
    """One accelerator (or one process's share of a CPU), with its peak matrix rate per precision."""

    name: str
    peak_flops_per_second: Mapping[str, float]
    source: str

    def peak(self, precision: str) -> float | None:
        """FLOP/s at this precision; None where no figure is known."""
        return self.peak_flops_per_second.get(precision)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a job runs: alike chips on alike nodes."""

    chip: Chip
    chips_per_node: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("chips_per_node", "num_nodes"):
            if getattr(self, name) < 1:
                raise ClusterError(f"{name}={getattr(self, name)}.", "It is a count.", "Give a whole number from 1.")

    @property
    def num_chips(self) -> int:
        """Chips over all nodes."""
        return self.chips_per_node * self.num_nodes


def find_chip(device_name: str) -> Chip | None:
    """The chip of the hardware table whose name the device's own name contains; None when it is not there."""
    table = tomllib.loads(files("trimaran.cluster").joinpath("hardware.toml").read_text(encoding="utf-8"))
    wanted = _plain(device_name)
    matches = [(len(_plain(word)), row) for row in table.values() for word in row["match"] if _plain(word) in wanted]
    if not matches:
        return None
    row = max(matches, key=lambda match: match[0])[1]
    rates = {precision: rate * 1e12 for precision, rate in row["tflops"].items()}
    return Chip(row["name"], rates, "hardware.toml")


def _plain(name: str) -> str:
    return "".join(name.lower().split())
