"""When two results are equal: the one rule, and the tolerance of each precision (docs/numerics.md has the reasons)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from trimaran.layout import Precision

TOLERANCES: Mapping[Precision, float] = {"fp64": 1e-12, "fp32": 2e-6, "tf32": 0.01, "bf16": 0.01, "fp16": 0.01}
"""What `excesses` of first gradients may be; never widened to make a comparison pass."""


def excesses(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Name -> what the tolerance must be for this tensor to pass: |a - b| <= tolerance · max(max|b|, 1e-3 · G).

    G is the largest |b| of all. A tensor that is missing on one side, has another shape or type, or holds what is no
    number never passes: inf.
    """
    largest = max((_largest(each) for each in expected.values()), default=0.0)
    found = dict.fromkeys(actual, math.inf)
    for name, b in expected.items():
        a = actual.get(name)
        if a is None or a.shape != b.shape or a.dtype != b.dtype:
            found[name] = math.inf
            continue
        allowed = max(_largest(b), 1e-3 * largest)
        difference = _largest(a.double() - b.double())
        ratio = difference / allowed if difference and allowed else difference
        found[name] = math.inf if math.isnan(ratio) or (difference and not allowed) else ratio
    return found


def state_excesses(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The same rule for each kind of optimizer state by itself: names are "parameter.kind"."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in (*expected, *actual))
    found: dict[str, float] = {}
    for kind in kinds:
        mine, theirs = (
            {name: each for name, each in one.items() if name.rpartition(".")[2] == kind} for one in (actual, expected)
        )
        found |= excesses(mine, theirs)
    return found


def excess(actual: float, expected: float) -> float:
    """The relative difference of two figures; 0 where both are no number, as of a step that both sides skipped."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    difference = abs(actual - expected)
    return math.inf if math.isnan(difference) or not expected else difference / abs(expected)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
