"""Descriptions of optimizers and learning-rate schedules, and what each builds once the parameters exist."""

from __future__ import annotations

from trimaran.optim.optimizers import adamw, sgd
from trimaran.optim.reference import by_reference
from trimaran.optim.schedules import constant, cosine, linear, warmup_stable_decay

__all__ = ["adamw", "by_reference", "constant", "cosine", "linear", "sgd", "warmup_stable_decay"]
