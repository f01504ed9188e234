"""Schedules: values by hand, bounds and continuity for any of them, what does not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimaran.errors import OptimizerError
from trimaran.job import Schedule
from trimaran.optim import constant, cosine, linear, warmup_stable_decay


def factors(schedule: Schedule, total_steps: int, *, steps_per_epoch: float = 10.0, beyond: int = 2) -> list[float]:
    factor = schedule.resolve(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    return [factor(update) for update in range(total_steps + beyond)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant(), [1, 1, 1, 1, 1, 1, 1, 1]),
        (constant("2steps"), [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (linear(), [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]),
        (linear("2steps", final=0.2), [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (linear(1.0), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 1]),
        (cosine("2steps", final=0.0), [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        (warmup_stable_decay("1steps", "4steps"), [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        (
            warmup_stable_decay(0, "4steps", final=0.1, shape="sqrt"),
            [1, 1, 1, 0.55, 1 - 0.9 * math.sqrt(0.5), 1 - 0.9 * math.sqrt(0.75), 0.1, 0.1],
        ),
        (warmup_stable_decay("1step", 0), [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_six_updates_by_hand_and_two_beyond(schedule: Schedule, expected: list[float]) -> None:
    assert factors(schedule, 6) == pytest.approx(expected, abs=1e-15)


def test_cosine_to_zero_is_torchs_own() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    plain = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    assert factors(cosine(final=0.0), 20, beyond=0) == pytest.approx(rates, abs=1e-12)


def test_warmup_in_steps_epochs_and_as_a_fraction_is_the_same() -> None:
    in_steps = factors(cosine("20steps"), 200)
    assert in_steps == factors(cosine("2epochs"), 200) == factors(cosine(0.1), 200)


def test_fractions_that_fill_the_run_fit_into_it_whatever_its_length() -> None:
    values = factors(warmup_stable_decay(0.5, 0.5), 7)  # each half is rounded to 4 steps
    assert values == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 2 / 3, 1 / 3, 0, 0])


SHAPES: list[Callable[[float, float], Schedule]] = [
    lambda warmup, final: constant(warmup),
    linear,
    cosine,
    lambda warmup, final: warmup_stable_decay(warmup, decay=1 - warmup, final=final),
    lambda warmup, final: warmup_stable_decay(warmup, decay=(1 - warmup) / 2, final=final, shape="sqrt"),
]


@given(
    shape=st.sampled_from(SHAPES),
    warmup=st.floats(0, 1),
    final=st.floats(0, 1),
    total_steps=st.integers(1, 300),
)
def test_any_schedule_rises_then_falls_within_bounds_and_without_jumps(
    shape: Callable[[float, float], Schedule], warmup: float, final: float, total_steps: int
) -> None:
    schedule = shape(warmup, final)
    values = factors(schedule, total_steps)
    warmup_steps = round(warmup * total_steps)
    up, down = values[:warmup_steps], values[warmup_steps:]
    assert all(0 < value <= 1 for value in up)
    assert all(a < b for a, b in itertools.pairwise(up))
    assert all(b - a == pytest.approx(1 / warmup_steps) for a, b in itertools.pairwise(up))
    assert up == [] or (up[0] == pytest.approx(1 / warmup_steps) and up[-1] == 1)
    assert all(a >= b for a, b in itertools.pairwise(down))
    assert down[0] == pytest.approx(1) or warmup_steps == total_steps
    assert all(final - 1e-12 <= value <= 1 + 1e-12 for value in down)
    assert values[total_steps] == values[total_steps + 1]


@pytest.mark.parametrize("schedule", [linear(0.1, final=0.1), cosine(0.1), warmup_stable_decay(0.1, 0.3, final=0.1)])
@pytest.mark.parametrize("total_steps", [10, 100, 1000])
def test_the_last_update_is_one_step_from_the_final_factor(schedule: Schedule, total_steps: int) -> None:
    values = factors(schedule, total_steps)
    largest_step = 0.9 / (0.3 * total_steps) + 1e-12
    assert 0.1 < values[total_steps - 1] <= 0.1 + largest_step
    assert values[total_steps] == pytest.approx(0.1)
    falls = [a - b for a, b in itertools.pairwise(values) if b < a]
    assert max(falls) <= largest_step


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (constant(), "constant"),
        (constant("1epoch"), "constant, 10 warm-up steps"),
        (cosine(0.05), "cosine to 0.1, 50 warm-up steps"),
        (cosine(1e-5), "cosine to 0.1, 0 warm-up steps"),
        (linear("1step"), "linear to 0, 1 warm-up step"),
        (
            warmup_stable_decay("50steps", shape="sqrt"),
            "stable, then sqrt to 0 over the last 200 steps, 50 warm-up steps",
        ),
    ],
)
def test_a_schedule_says_what_it_does(schedule: Schedule, text: str) -> None:
    assert schedule.describe(total_steps=1000, steps_per_epoch=10.0) == text
    assert isinstance(schedule, Schedule)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cosine(100), ["warmup=100", "100steps"]),
        (lambda: cosine("10min"), ["wall time"]),
        (lambda: linear("fast"), ["'fast'"]),
        (lambda: linear("-5steps"), ["'-5steps'"]),
        (lambda: cosine(final=1.5), ["final=1.5", "from 0 to 1"]),
        (lambda: cosine(final=None), ["final=None"]),
        (lambda: warmup_stable_decay(0.1, decay="1h"), ["decay='1h'", "wall time"]),
        (lambda: warmup_stable_decay(0.1, shape="round"), ["shape='round'"]),
        (lambda: factors(cosine("21steps"), 20), ["warm-up of 21 steps", "run of 20 steps"]),
        (lambda: factors(constant("3epochs"), 20), ["warm-up of 30 steps"]),
        (
            lambda: factors(warmup_stable_decay("11steps", 0.5), 20),
            ["warm-up of 11 steps and a decay of 10 steps", "run of 20 steps"],
        ),
        (lambda: factors(cosine(), 0), ["0 steps"]),
    ],
)
def test_what_cannot_be_meant_or_does_not_fit_is_refused(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.rule
    assert caught.value.remedy
