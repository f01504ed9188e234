from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, get_args

import pytest

from trimaran.cluster import Chip, Cluster, find_chip
from trimaran.errors import ClusterError
from trimaran.layout import Precision


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA GB200", "NVIDIA GB200 SXM"),
        ("NVIDIA B200", "NVIDIA B200 SXM"),
        ("AMD Instinct MI300X", "AMD MI300X"),
        ("NVIDIA GeForce GTX 970", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_own_name(device: str, chip: str | None) -> None:
    found = find_chip(device)
    assert (found.name if found else None) == chip


def test_a_rate_without_a_figure_is_not_guessed() -> None:
    chip = find_chip("NVIDIA H100 PCIe")
    assert chip is not None
    assert chip.peak("bf16") == 756e12
    assert chip.peak("fp64") is None


def test_every_row_of_the_table_is_whole() -> None:
    table: dict[str, Any] = tomllib.loads(files("trimaran.cluster").joinpath("hardware.toml").read_text())
    for row in table.values():
        assert row["name"]
        assert row["match"]
        assert set(row["tflops"]) <= set(get_args(Precision))
        assert all(rate > 0 for rate in row["tflops"].values())


def test_a_cluster_counts_its_chips() -> None:
    chip = Chip("a", {"bf16": 1e12}, "invented")
    assert Cluster(chip=chip, chips_per_node=8, num_nodes=3).num_chips == 24
    with pytest.raises(ClusterError, match=r"num_nodes=0\."):
        Cluster(chip=chip, num_nodes=0)
