from __future__ import annotations

import itertools

from trimaran.world.place import AXES, Place, place_of


def test_ranks_count_tensor_first_then_data_then_pipeline() -> None:
    for pp, dp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3)):
        places = [place_of(rank, dp=dp, tp=tp) for rank in range(pp * dp * tp)]
        assert places == [Place(*each) for each in itertools.product(range(pp), range(dp), range(tp))]


def test_axes_are_named_as_places_are() -> None:
    assert AXES == ("pp", "dp", "tp")
    assert tuple(Place.__dataclass_fields__) == AXES
