"""Which layouts are verified, and against what."""

from __future__ import annotations

import pytest
from prove_jobs import job

from trimaran import layout as layouts
from trimaran.errors import LayoutError, UsageError
from trimaran.layout import Layout
from trimaran.prove.verify_layouts import (
    choose_reference,
    choose_steps,
    cut_alike,
    enumerate_layouts,
    parse_layout,
    resolve,
)


def test_float64_unless_a_precision_is_named() -> None:
    assert parse_layout("dp=2").precision == "fp64"
    assert parse_layout("dp=2 precision=bf16").precision == "bf16"
    assert parse_layout(Layout(dp=2)).precision == "fp32"


def test_a_layout_has_as_many_ranks_as_it_needs() -> None:
    assert resolve(Layout(dp=3), job()).dp == 3
    assert resolve(Layout(), job()).dp == 1
    assert resolve(Layout(), job(), num_ranks=4).dp == 4
    with pytest.raises(LayoutError, match="there are 2"):
        resolve(Layout(dp=3), job(), num_ranks=2)


def test_the_reference_is_one_process_with_the_whole_batch_at_the_same_precision() -> None:
    layout = resolve(parse_layout("dp=2 micro_batch=4 precision=bf16"), job())
    assert str(choose_reference("", layout, job())) == "dp=1 micro_batch=32 precision=bf16"
    assert str(choose_reference("dp=4", layout, job())) == "dp=4 micro_batch=8 precision=bf16"
    assert str(cut_alike(choose_reference("", layout, job()), layout, job())) == "dp=1 micro_batch=4 precision=bf16"
    with pytest.raises(LayoutError, match="precision=bf16 against precision=fp64"):
        choose_reference("precision=fp64", layout, job())


def test_steps_are_those_of_the_job() -> None:
    assert choose_steps(job(), None) == 5
    assert choose_steps(job(steps=3), None) == 3
    assert choose_steps(job(steps=3), 3) == 3
    for steps in (0, 4):
        with pytest.raises(UsageError, match="own 3"):
            choose_steps(job(steps=3), steps)


def test_all_layouts_are_those_of_the_axes_that_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_BUILT", ("dp", "micro_batch", "precision"))
    found = [str(each) for each in enumerate_layouts(job(), num_ranks=4)]
    assert found == ["dp=4 precision=fp64", "dp=4 micro_batch=3 precision=fp64"]
    assert [str(each) for each in enumerate_layouts(job(global_batch=4), num_ranks=4)] == ["dp=4 precision=fp64"]


def test_all_layouts_of_every_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ("dp", "tp", "zero", "shard", "sp", "micro_batch", "precision", "recompute")
    monkeypatch.setattr(layouts, "_BUILT", built)
    without_plan = enumerate_layouts(job(), num_ranks=4)
    assert {(each.dp, each.tp) for each in without_plan} == {(4, 1)}
    assert {(each.zero, each.shard) for each in without_plan} == {
        (0, None),
        *((zero, shard) for zero in (1, 2, 3) for shard in (None, 2)),
    }
    found = enumerate_layouts(job(tp_plan={"first": "colwise", "last": "rowwise"}), num_ranks=4)
    assert {(each.dp, each.tp, each.sp) for each in found} == {
        (4, 1, False),
        *((dp, tp, sp) for dp, tp in ((2, 2), (1, 4)) for sp in (False, True)),
    }
    assert all(each.dp * each.tp == 4 for each in found if each.dp)
    assert {each.recompute for each in found} == {"none", "selective", "full"}
    assert all(each.dp != 1 or each.zero == 0 for each in found)
    assert len(set(map(str, found))) == len(found)
    for each in found:
        resolve(each, job(), num_ranks=4)
