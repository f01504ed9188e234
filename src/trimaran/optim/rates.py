"""The scaling rule: a learning rate belongs to the batch it was tuned at."""

from __future__ import annotations

import math
from typing import Literal

from trimaran.errors import OptimizerError
from trimaran.job import ScaledRate
from trimaran.optim.checks import is_count, is_number
from trimaran.units import format_number

Rule = Literal["sqrt", "linear"]

# Goyal et al. 2017, arXiv 1706.02677: k times the batch, k times the rate; with warm-up.
# Malladi et al. 2022, arXiv 2205.10287: for adaptive optimizers the square root of k. They move the betas
# and epsilon with the batch too; here only the rate moves.
_SOURCES = {"linear": "linear, Goyal et al. 2017", "sqrt": "square root, Malladi et al. 2022"}


def scaled_rate(lr: float, *, at_batch: int | None, rule: Rule | None, global_batch: int) -> ScaledRate:
    """`lr`, tuned at `at_batch` samples, carried over to `global_batch` samples, with the sentence that says how."""
    written = format_number(lr)
    if at_batch is None:
        return ScaledRate(lr, f"{written} (no at_batch: not scaled)")
    if global_batch == at_batch:
        return ScaledRate(lr, f"{written} at batch {at_batch}")
    if rule is None:
        return ScaledRate(lr, f"{written} at batch {at_batch}, kept at {global_batch} (rule=None: not scaled)")
    ratio = global_batch / at_batch
    value = lr * (ratio if rule == "linear" else math.sqrt(ratio))
    return ScaledRate(
        value, f"{written} at batch {at_batch} → {format_number(value)} at {global_batch} ({_SOURCES[rule]})"
    )


def check_rate(name: str, lr: float, at_batch: int | None, rule: str | None) -> None:
    """Raises OptimizerError for a rate, batch or rule that cannot be meant."""
    if not is_number(lr) or not 0 < lr < math.inf:
        raise OptimizerError(f"{name}(lr={lr!r}).", "A learning rate is above 0.", "Give a number such as 3e-4.")
    if at_batch is not None and not is_count(at_batch):
        raise OptimizerError(
            f"{name}(at_batch={at_batch!r}).",
            "It is the global batch, in samples, that the learning rate was tuned at.",
            "Give a whole number from 1, or None for a rate that is not scaled.",
        )
    if rule is not None and rule not in _SOURCES:
        raise OptimizerError(
            f"{name}(rule={rule!r}).",
            'A rate is scaled with the batch by its square root ("sqrt"), linearly ("linear"), or not at all (None).',
            'Give "sqrt", "linear" or None.',
        )
