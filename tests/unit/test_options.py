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
