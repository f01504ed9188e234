from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.errors import LayoutError
from trimaran.layout import Layout, Slice, deal


@pytest.mark.parametrize(
    "text", ["", "dp=2", "dp=2 micro_batch=4 precision=bf16", "dp=2,precision=fp64", "  micro_batch=1  "]
)
def test_text_and_layout_are_one(text: str) -> None:
    layout = Layout.parse(text)
    assert Layout.parse(str(layout)) == layout
    assert str(layout) == " ".join(text.replace(",", " ").split())


def test_defaults_are_not_printed() -> None:
    assert str(Layout.parse("tp=1 precision=fp32 sp=false dp=3")) == "dp=3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp", "'dp' is not of the form axis=value."),
        ("dp=", "'dp=' is not of the form"),
        ("dpp=2", "'dpp' is no axis of a layout."),
        ("dp=1 dp=1", "dp is given twice."),
        ("dp=two", "dp='two'."),
        ("dp=0", "dp=0."),
        ("dp=-2", "dp=-2."),
        ("micro_batch=1.5", "micro_batch='1.5'."),
        ("zero=4", "zero=4."),
        ("precision=bf61", "precision='bf61' is unknown."),
        ("recompute=all", "recompute='all' is unknown."),
        ("sp=maybe", "sp='maybe'."),
        ("dp = 2", "'dp' is not of the form"),
        ("pp=2", "pp=2 is not built yet."),
        ("shard=2", "shard=2 with zero=0."),
        ("pipe=gpipe", "pipe=gpipe is not built yet."),
        ("vpp=2", "vpp=2 is not built yet."),
        ("sp=true", "sp=true with tp=1."),
    ],
)
def test_refused_layouts(text: str, said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert caught.value.value.startswith(said)
    assert caught.value.rule
    assert caught.value.remedy


@pytest.mark.parametrize("values", [{"dp": True}, {"dp": 2.0}, {"micro_batch": 0}, {"zero": -1}, {"precision": "FP32"}])
def test_refused_values(values: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        Layout(**values)


def test_dp_fills_the_world_and_micro_batch_the_share() -> None:
    layout = Layout().resolve(world_size=4, global_batch=10)
    assert (layout.dp, layout.micro_batch) == (4, 3)
    assert Layout(micro_batch=2).resolve(world_size=4, global_batch=10).micro_batch == 2
    assert Layout(micro_batch=9).resolve(world_size=4, global_batch=10).micro_batch == 3
    assert Layout().resolve(world_size=4, global_batch=2).micro_batch == 1
    assert layout.resolve(world_size=4, global_batch=10) == layout


@pytest.mark.parametrize(("dp", "world_size"), [(2, 1), (2, 3), (1, 2)])
def test_a_layout_that_does_not_fit_the_world(dp: int, world_size: int) -> None:
    with pytest.raises(LayoutError, match=f"--procs {dp}") as caught:
        Layout(dp=dp).resolve(world_size=world_size, global_batch=8)
    assert f"there are {world_size}." in caught.value.value


batches = st.tuples(st.integers(0, 1000), st.integers(1, 50), st.integers(1, 9), st.integers(1, 20))


@given(batches)
def test_every_sample_is_dealt_once_and_in_order(batch: tuple[int, int, int, int]) -> None:
    start, count, dp, micro_batch = batch
    ranks = [deal(start=start, stop=start + count, dp=dp, dp_rank=rank, micro_batch=micro_batch) for rank in range(dp)]
    dealt = [at for slices in ranks for each in slices if not each.weightless for at in range(each.start, each.stop)]
    assert dealt == list(range(start, start + count))


@given(batches)
def test_all_ranks_run_as_many_micro_batches_of_at_most_their_size(batch: tuple[int, int, int, int]) -> None:
    start, count, dp, micro_batch = batch
    ranks = [deal(start=start, stop=start + count, dp=dp, dp_rank=rank, micro_batch=micro_batch) for rank in range(dp)]
    assert {len(slices) for slices in ranks} == {math.ceil(math.ceil(count / dp) / micro_batch)}
    shares = [sum(each.stop - each.start for each in slices if not each.weightless) for slices in ranks]
    assert max(shares) - min(shares) <= 1
    assert all(0 < each.stop - each.start <= micro_batch for slices in ranks for each in slices)
    fillers = {each for slices in ranks for each in slices if each.weightless}
    assert fillers <= {Slice(start, start + 1, weightless=True)}
