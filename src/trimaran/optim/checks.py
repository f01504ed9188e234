"""What the checks of optimizers and schedules share."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from trimaran.errors import OptimizerError


def check_number(
    name: str, option: str, value: object, *, low: float = 0.0, below: float = math.inf, rule: str, example: float
) -> None:
    """Raises OptimizerError for what is not a number in [low, below)."""
    if not is_number(value) or not low <= value < below:  # type: ignore[operator]
        raise OptimizerError(f"{name}({option}={value!r}).", rule, f"Give, for example, {option}={example}.")


def is_number(value: object) -> bool:
    """An int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """A whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy that names the known word nearest to this one, if one is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else "Use one of those."
