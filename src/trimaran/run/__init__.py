"""Runs: a job in a layout, looked after, in a directory of its own."""

from trimaran.run.assemble import start, train
from trimaran.run.describe import Origin
from trimaran.run.loop import Run

__all__ = ["Origin", "Run", "start", "train"]
