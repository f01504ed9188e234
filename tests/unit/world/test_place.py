from __future__ import annotations

import itertools

from trimaran.world.place import AXES, CUTTING_AXES, Place, place_of


def test_ranks_count_tensor_first_then_data_then_pipeline() -> None:
    for pp, dp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3)):
        places = [place_of(rank, dp=dp, tp=tp) for rank in range(pp * dp * tp)]
        for place, each in zip(places, itertools.product(range(pp), range(dp), range(tp)), strict=True):
            assert (place.pp, place.dp, place.tp, place.replicate, place.shard) == (*each, each[1], 0)


def test_data_ranks_that_share_shards_are_neighbours() -> None:
    places = [place_of(rank, dp=4, tp=2, shard=2) for rank in range(8)]
    assert [each.dp for each in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [each.replicate for each in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [each.shard for each in places] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_axes_are_named_as_places_are() -> None:
    assert AXES == ("pp", "dp", "tp")
    assert tuple(Place.__dataclass_fields__) == CUTTING_AXES
