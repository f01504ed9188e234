"""A small job in which nothing is wrong, and parts to put one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import trimaran as tm
from trimaran.prove import Finding, Limits, check_job

FEATURES, CLASSES, SAMPLES = 12, 4, 256
LIMITS = Limits(overfit_steps=120, training_seconds=5.0, loading_seconds=0.5)


class Points:
    """Points of a plane-cut space: the class is the largest of four fixed products. `fault` changes a sample."""

    def __init__(self, fault: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda sample: sample) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.label = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
        self.fault = fault

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.fault({"x": self.x[index], "label": self.label[index]})


class Net(nn.Module):
    """Two layers. Subclasses put something into `middle`, which is called between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.last = nn.Linear(width, CLASSES)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


def job(model: Callable[[], nn.Module] = Net, **changes: Any) -> tm.Job:
    """The job with changed fields."""
    good = tm.Job(
        model=model,
        data=Points(),
        inputs=("x",),
        loss=tm.losses.cross_entropy(),
        metrics={"accuracy": tm.losses.accuracy()},
        optimizer=tm.optim.adamw(lr=1e-2),
        schedule=tm.optim.cosine(warmup=0.1),
        global_batch=32,
        steps=200,
    )
    return replace(good, **changes)


def check(job: tm.Job, **options: Any) -> dict[str, Finding]:
    """All findings, by name."""
    return {finding.name: finding for finding in check_job(job, device="cpu", **({"limits": LIMITS} | options))}


def failures(findings: dict[str, Finding]) -> list[str]:
    """The names of those that failed."""
    return [name for name, finding in findings.items() if finding.status == "failed"]
