"""A rank's place: its coordinate on each axis of the layout."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
"""Slowest first: tensor ranks are neighbours, pipeline stages lie farthest apart."""


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank: `place.dp` of `layout.dp`, and so on."""

    pp: int
    dp: int
    tp: int


def place_of(rank: int, *, dp: int, tp: int) -> Place:
    """The place of `rank` where ranks count tensor first, then data, then pipeline."""
    return Place(pp=rank // (dp * tp), dp=rank // tp % dp, tp=rank % tp)
