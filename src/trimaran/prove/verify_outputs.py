"""The first module whose outputs differ between two sides, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.prove.tolerances import TOLERANCES
from trimaran.prove.verify_activations import INPUT, Activation
from trimaran.prove.verify_side import Side

_LAXER, _LAXEST = 10.0, 0.05
"""An output's name helps to find a fault that is shown by gradients: it is told for what is clearly off only."""

Rows = Mapping[int, tuple[int, Tensor]]
"""Position in the run -> (numbers in each sum, values [width, 2])."""


@dataclass(frozen=True)
class Output:
    """One that differs."""

    name: str
    excess: float
    cause: str


def find_output(side: Side, reference: Side) -> Output | None:
    """The first in the reference's forward that differs, or that the side has for other samples; None for none."""
    tolerance = min(_LAXER * TOLERANCES[side.precision], _LAXEST)
    mine, theirs = _by_name(side.activations), _by_name(reference.activations)
    if not mine or not theirs:
        return None
    alike = _same_inputs(mine, theirs)
    # A first dim that is the number of samples by chance has another size in another forward.
    rowless = {*side.rowless, *reference.rowless}
    for name, expected in theirs.items():
        found = mine.get(name, {})
        if name.startswith(INPUT) and (missing := sorted(expected.keys() - found.keys())):
            samples = f"the sample at position {missing[0]}" if len(missing) == 1 else _span(missing)
            return Output(name.removeprefix(INPUT), 1.0, f"{samples} of the batch did not go forward")
        if name.startswith(INPUT) or name in rowless:
            continue
        off = _excess(list(_comparable(found, expected, alike)))
        if off > tolerance:
            return Output(name, off, "every output before it agrees")
    return None


def _span(positions: list[int]) -> str:
    return f"{len(positions)} samples, from position {positions[0]},"


def _by_name(activations: list[Activation]) -> dict[str, dict[int, tuple[int, Tensor]]]:
    found: dict[str, dict[int, tuple[int, Tensor]]] = {}
    for each in activations:
        rows = found.setdefault(each.name, {})
        rows |= {each.start + index: (each.rest, values) for index, values in enumerate(each.values)}
    return found


def _same_inputs(mine: Mapping[str, Rows], theirs: Mapping[str, Rows]) -> set[int]:
    """Samples whose inputs begin alike, so that what a cut pads them with stands at their end."""
    names = [name for name in theirs if name.startswith(INPUT)]
    return {
        position
        for position in (theirs[names[0]] if names else {})
        if all(
            position in mine.get(name, {}) and _begin_alike(mine[name][position], theirs[name][position])
            for name in names
        )
    }


def _begin_alike(one: tuple[int, Tensor], other: tuple[int, Tensor]) -> bool:
    width = min(len(one[1]), len(other[1]))
    return one[0] == other[0] and torch.equal(one[1][:width], other[1][:width])


def _comparable(found: Rows, expected: Rows, alike: set[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(numbers in each sum, ours, theirs) for each sample, without what one side alone has as padding."""
    for position in expected.keys() & found.keys():
        (rest, theirs), (other_rest, mine) = expected[position], found[position]
        if rest != other_rest or (len(mine) != len(theirs) and position not in alike):
            continue
        width = min(len(mine), len(theirs))
        yield rest, mine[:width], theirs[:width]


def _excess(pairs: list[tuple[int, Tensor, Tensor]]) -> float:
    """By how much they are off, as a share of the largest size that a row's numbers allow."""
    if not pairs:
        return 0.0
    # |sum| is at most the root of (count · sum of squares), and of that size unless the numbers cancel.
    squares = max(float(theirs[:, 1].max()) for _, _, theirs in pairs)
    sums = max(float((rest * theirs[:, 1]).max()) for rest, _, theirs in pairs) ** 0.5
    worst = 0.0
    for _, mine, theirs in pairs:
        for column, size in ((0, sums), (1, 2 * squares)):
            difference = float((mine[:, column] - theirs[:, column]).abs().max())
            worst = max(worst, float("inf") if difference and not size else difference / size if size else 0.0)
    return worst
