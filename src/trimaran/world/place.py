"""A rank's place: its coordinate on each axis of the layout."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("pp", "dp", "tp")
"""Slowest first: tensor ranks are neighbours, pipeline stages lie farthest apart."""

CUTTING_AXES = (*AXES, "replicate", "shard")
"""The axes over which tensors lie: those, and the two that dp is made of where it shards."""


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank: `place.dp` of `layout.dp`, and so on.

    `dp` is also `replicate`, the number of the group that shards among itself, and `shard`, the place in it.
    """

    pp: int
    dp: int
    tp: int
    replicate: int
    shard: int


def place_of(rank: int, *, dp: int, tp: int, shard: int = 1) -> Place:
    """The place of `rank` where ranks count tensor first, then data, then pipeline; `shard` divides `dp`."""
    of_dp = rank // tp % dp
    return Place(pp=rank // (dp * tp), dp=of_dp, tp=rank % tp, replicate=of_dp // shard, shard=of_dp % shard)
