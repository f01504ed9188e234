"""Writes the samples of each workload into a folder, so that the processes that are measured only read them."""

from __future__ import annotations

from pathlib import Path

import tyro
from safetensors.torch import save_file
from workloads import NUM_BATCHES, WORKLOADS


def main(folder: Path, /) -> None:
    for name, workload in WORKLOADS.items():
        save_file(workload.draw(NUM_BATCHES * workload.global_batch), folder / f"{name}.safetensors")


if __name__ == "__main__":
    tyro.cli(main)
