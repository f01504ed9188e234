"""Trimaran trains any PyTorch model on one device or on thousands, with the same result.

    import trimaran as tm

The public face. Names are looked up when they are first used, so that importing it costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimaran import data, errors, losses, optim
    from trimaran.checkpoint import export_weights
    from trimaran.cluster import Cluster
    from trimaran.job import Job, Weights
    from trimaran.layout import Layout
    from trimaran.options import RunOptions
    from trimaran.prove import check_job, verify_job
    from trimaran.run import Run, start, train
    from trimaran.tensor_plan import colwise, rowwise, sequence, vocab

_HOMES = {
    "Cluster": "cluster",
    "Job": "job",
    "Layout": "layout",
    "RunOptions": "options",
    "Run": "run",
    "Weights": "job",
    "check_job": "prove",
    "colwise": "tensor_plan",
    "export_weights": "checkpoint",
    "rowwise": "tensor_plan",
    "sequence": "tensor_plan",
    "start": "run",
    "train": "run",
    "verify_job": "prove",
    "vocab": "tensor_plan",
}
_MODULES = ("data", "errors", "losses", "optim")

__all__ = [
    "Cluster",
    "Job",
    "Layout",
    "Run",
    "RunOptions",
    "Weights",
    "check_job",
    "colwise",
    "data",
    "errors",
    "export_weights",
    "losses",
    "optim",
    "rowwise",
    "sequence",
    "start",
    "train",
    "verify_job",
    "vocab",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"trimaran.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"trimaran.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'trimaran' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
