from __future__ import annotations

from typing import Any

import pytest

from trimaran.errors import UsageError
from trimaran.options import RunOptions
from trimaran.units import Duration


@pytest.mark.parametrize(
    "values",
    [
        {"device": "tpu"},
        {"num_workers": -1},
        {"log_every": 0},
        {"evaluate_every": "10min"},
        {"evaluate_every": "soon"},
        {"evaluate_every": "100"},
        {"save_every": "soon"},
        {"save_every": ""},
        {"save_every": "0.5"},
        {"save_every": "100"},
        {"save_every": "0min"},
        {"save_every": "0steps"},
        {"save_every": "0epochs"},
        {"save_every": "10min 0steps"},
        {"save_every": "10min 20min"},
        {"save_every": "200steps 1epoch"},
        {"save_every": "10min 200steps 1epoch"},
        {"save_every": "never 10min"},
        {"save_every": "200steps and 10min"},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": 2.5},
        {"keep_last": True},
        {"keep_last": "2"},
        {"keep_last": "none"},
        {"keep_every": "10min"},
        {"keep_every": "0.5"},
        {"keep_every": "0steps"},
        {"keep_every": "0epochs"},
        {"keep_every": "100"},
        {"keep_every": "often"},
        {"keep_best": "accuracy"},
        {"keep_best": ""},
        {"keep_best": "accuracy:"},
        {"keep_best": "accuracy:most"},
        {"keep_best": ":max"},
        {"drill": "kill step=7"},
    ],
)
def test_refused_options(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        RunOptions(**values)
    assert str(next(iter(values.values()))) in caught.value.value
    assert caught.value.rule
    assert caught.value.remedy


def test_the_interval_of_evaluations() -> None:
    assert RunOptions().evaluation_interval is None
    assert RunOptions(evaluate_every="2epochs").evaluation_interval == Duration(epochs=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("never", ()),
        (" never ", ()),
        ("10min", (Duration(seconds=600),)),
        ("200steps", (Duration(steps=200),)),
        ("1epoch", (Duration(epochs=1),)),
        ("0.5h", (Duration(seconds=1800),)),
        (".5epochs", (Duration(epochs=0.5),)),
        ("10min 200steps", (Duration(seconds=600), Duration(steps=200))),
        ("200 steps 10 min", (Duration(steps=200), Duration(seconds=600))),
        ("10min,200steps", (Duration(seconds=600), Duration(steps=200))),
        ("10min + 1epoch", (Duration(seconds=600), Duration(epochs=1))),
    ],
)
def test_when_a_run_saves(text: str, expected: tuple[Duration, ...]) -> None:
    assert RunOptions(save_every=text).save_intervals == expected


def test_a_run_saves_every_ten_minutes_and_keeps_two() -> None:
    options = RunOptions()
    assert options.save_intervals == (Duration(seconds=600),)
    assert (options.keep_last, options.kept_interval, options.best_figure) == (2, None, None)


def test_what_is_kept() -> None:
    assert RunOptions(keep_last=1).keep_last == 1
    assert RunOptions(keep_last="all").keep_last == "all"
    assert RunOptions(keep_every="1000steps").kept_interval == Duration(steps=1000)
    assert RunOptions(keep_every="0.5epochs").kept_interval == Duration(epochs=0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss", ("loss", "min")),
        ("loss:min", ("loss", "min")),
        ("accuracy:max", ("accuracy", "max")),
        ("perplexity:min", ("perplexity", "min")),
    ],
)
def test_the_best_figure(text: str, expected: tuple[str, str]) -> None:
    assert RunOptions(keep_best=text).best_figure == expected
