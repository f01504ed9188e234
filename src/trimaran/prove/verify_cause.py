"""Why a tensor differs, as far as the numbers show it: a constant factor, a sum that is missing, another group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from trimaran.prove.tolerances import TOLERANCES, excesses
from trimaran.prove.verify_side import (
    EARLY_STATE,
    EARLY_WEIGHTS,
    FIRST_GRADIENTS,
    FIRST_WEIGHTS,
    SECOND_GRADIENTS,
    Side,
)

_LINEAR_STATE = ("exp_avg", "momentum_buffer")
"""Kinds of optimizer state that, after one step, are a multiple of the gradient."""


def explain_figure(side: Side, reference: Side, mine: float, theirs: float) -> str:
    """Why a loss or a norm differs; empty where its ratio tells nothing."""
    if not theirs or not math.isfinite(mine / theirs):
        return ""
    told = name_factor(mine / theirs, side, reference)
    return f"off by a factor of {told}" if told else ""


def explain_norm(side: Side, reference: Side) -> str:
    """Why the first step's norm differs though its gradients agree."""
    mine, theirs = side.norms[0], reference.norms[0]
    for axis, degree in (("tp", side.tp), ("dp", side.dp)):
        if degree == 1 or not theirs:
            continue
        counted = (mine * mine - theirs * theirs) / (degree - 1)
        for name, gradient in reference.at(FIRST_GRADIENTS).items():
            if _is_close(counted, float(gradient.double().square().sum()), side):
                return f"{name} is counted {degree} times = {axis}"
    return explain_figure(side, reference, mine, theirs)


def explain_gradient(side: Side, reference: Side, name: str, moment: str) -> str:
    """Why a gradient differs."""
    mine, theirs = side.at(moment).get(name), reference.at(moment).get(name)
    if mine is None or theirs is None:
        return "it is missing on one side"
    if mine.shape != theirs.shape:
        return f"its shape is {tuple(mine.shape)}, and {tuple(theirs.shape)} in the reference"
    if moment == FIRST_GRADIENTS and (told := _explain_ranks(side, name, theirs)):
        return told
    if not mine.any():
        return "it is zero: nothing arrived"
    ratio = constant_ratio(mine, theirs, side)
    if ratio is not None:
        told = name_factor(ratio, side, reference)
        if told:
            extra = _explain_average(ratio, side)
            return f"off by a factor of {told}{extra}"
    if moment == SECOND_GRADIENTS:
        before = side.at(FIRST_GRADIENTS).get(name)
        if before is not None and _is_multiple(mine - theirs, before, side):
            return "the gradient of the step before is still in it: it was not dropped"
    if ratio is not None:
        return f"off by a constant factor of {ratio:.6g}"
    return "no constant factor"


def explain_update(side: Side, reference: Side, name: str) -> str:
    """Why a weight differs after the first update, though its gradient agrees."""
    told = explain_options(side, reference, name)
    if told:
        return told
    start, mine, theirs = (
        one.at(moment).get(name)
        for one, moment in ((reference, FIRST_WEIGHTS), (side, EARLY_WEIGHTS), (reference, EARLY_WEIGHTS))
    )
    if start is None or mine is None or theirs is None or mine.shape != theirs.shape:
        return ""
    moved, expected = mine.double() - start.double(), theirs.double() - start.double()
    if not moved.any():
        return "it was not updated"
    for kind in _LINEAR_STATE:
        one, other = side.at(EARLY_STATE).get(f"{name}.{kind}"), reference.at(EARLY_STATE).get(f"{name}.{kind}")
        ratio = None if one is None or other is None else constant_ratio(one, other, side)
        if ratio is not None:
            return f"its gradient was multiplied by {_describe_factor(ratio, side, reference)} on the way"
    ratio = constant_ratio(moved, expected, side)
    return "" if ratio is None else f"its update is off by a factor of {_describe_factor(ratio, side, reference)}"


def explain_options(side: Side, reference: Side, name: str) -> str:
    """Which options of its optimizer's group differ; empty where none does."""
    mine, theirs = side.options.get(name), reference.options.get(name)
    if mine is None or theirs is None:
        return "" if mine == theirs else "the optimizer has it on one side only"
    told = [
        f"{key} is {mine.get(key)} here, and {theirs.get(key)} in the reference"
        for key in dict.fromkeys((*theirs, *mine))
        if mine.get(key) != theirs.get(key)
    ]
    return f"it is in another parameter group: {', '.join(told)}" if told else ""


def name_factor(ratio: float, side: Side, reference: Side) -> str:
    """What a factor is, such as "2 = dp" or "0.25 = 1 / micro-batches"; empty for one that has no name."""
    if not math.isfinite(ratio) or _is_close(ratio, 1.0, side):
        return ""
    for names in (_single_factors(side, reference), _double_factors(side)):
        found = [
            text
            for name, value in names
            for text, candidate in (
                (name, value),
                (f"1 / {name}", 1 / value),
                (f"{name}²", value * value),
                (f"1 / {name}²", 1 / (value * value)),
                (f"√{name}", math.sqrt(value)),
                (f"1 / √{name}", 1 / math.sqrt(value)),
            )
            if _is_close(ratio, candidate, side)
        ]
        if found:
            return f"{ratio:.6g} = {' or '.join(found)}"
    return ""


def constant_ratio(mine: Tensor, theirs: Tensor, side: Side) -> float | None:
    """r where mine = r · theirs, to what the precision allows; None where there is no such number, or it is 1."""
    a, b = mine.double().flatten(), theirs.double().flatten()
    square = float(b @ b)
    if a.shape != b.shape or not square or not math.isfinite(square):
        return None
    ratio = float(a @ b) / square
    is_constant = ratio and _agree(a, ratio * b, side)
    return ratio if is_constant and not _is_close(ratio, 1.0, side) else None


def _single_factors(side: Side, reference: Side) -> Iterator[tuple[str, float]]:
    norm = reference.norms[0] if reference.norms else math.nan
    clip = 1.0 if side.clip is None else min(1.0, side.clip / (norm + 1e-6))
    yield from _different_from_one(
        {
            "dp": side.dp,
            "tp": side.tp,
            "micro-batches": side.num_micro_batches,
            "the loss scale": side.loss_scale,
            "the batch's weight": reference.weight,
            "the batch's samples": side.global_batch,
            "the clip coefficient": clip,
        }
    )


def _double_factors(side: Side) -> Iterator[tuple[str, float]]:
    degrees = {"dp": side.dp, "tp": side.tp, "micro-batches": side.num_micro_batches}
    pairs = {f"({one} · {two})": degrees[one] * degrees[two] for one in degrees for two in degrees if one < two}
    return _different_from_one(pairs)


def _different_from_one(factors: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in factors.items() if value > 0 and value != 1 and math.isfinite(value))


def _explain_ranks(side: Side, name: str, theirs: Tensor) -> str:
    """What the sum over the ranks of an axis tells, where they hold unlike gradients."""
    for axis, degree in (("dp", side.dp), ("tp", side.tp)):
        total = side.rank_sums.get(axis, {}).get(name)
        if total is None or degree == 1:
            continue
        if _agree(total, theirs.double(), side):
            return f"its reduction over {axis} is missing: what the ranks hold adds up to the reference"
        ratio = constant_ratio(total, theirs, side)
        if ratio is not None and 1 < round(ratio) < degree and _is_close(ratio, round(ratio), side):
            return f"it was reduced over groups of {round(ratio)} of the {degree} ranks of {axis}"
    unlike = [each for each in side.unlike if each.name == name and each.moment == FIRST_GRADIENTS]
    return f"rank {unlike[0].rank} holds another one than rank 0: it was not reduced alike" if unlike else ""


def _explain_average(ratio: float, side: Side) -> str:
    for axis, degree in (("dp", side.dp), ("tp", side.tp)):
        if degree > 1 and _is_close(ratio, 1 / degree, side):
            return f": averaged over {axis}, where a sum belongs"
        if degree > 1 and _is_close(ratio, degree, side):
            return f": counted once for each rank of {axis}"
    return ""


def _describe_factor(ratio: float, side: Side, reference: Side) -> str:
    return name_factor(ratio, side, reference) or f"{ratio:.6g}"


def _is_multiple(mine: Tensor, theirs: Tensor, side: Side) -> bool:
    # Updating may have scaled a gradient in place.
    return _agree(mine, theirs, side) or constant_ratio(mine, theirs, side) is not None


def _agree(mine: Tensor, theirs: Tensor, side: Side) -> bool:
    # A cause is a reading of numbers that are wrong already: some digits less than equality needs are enough.
    return excesses({"": mine.double()}, {"": theirs.double()})[""] <= 100 * TOLERANCES[side.precision]


def _is_close(one: float, other: float, side: Side) -> bool:
    return math.isclose(one, other, rel_tol=max(1e-9, 10 * TOLERANCES[side.precision]))
