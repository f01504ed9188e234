from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimaran.errors import UsageError
from trimaran.units import (
    Duration,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("40 GiB", 40 * 2**30), ("1.5GB", 1_500_000_000), ("512", 512), (" 3kB ", 3000), (".5KiB", 512), ("1e3 B", 1000)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1 gib", "1 GiB 2", "nan", "1,5 GB", "0x10"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match=r"size such as|unknown unit"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("10min", Duration(seconds=600)),
        ("1.5 h", Duration(seconds=5400)),
        ("200steps", Duration(steps=200)),
        ("1 step", Duration(steps=1)),
        ("2epochs", Duration(epochs=2)),
        ("0.05", Duration(fraction=0.05)),
        (0.05, Duration(fraction=0.05)),
        (1, Duration(fraction=1)),
        ("0", Duration(fraction=0)),
    ],
)
def test_spans(text: str | float, span: Duration) -> None:
    assert parse_duration(text) == span


@pytest.mark.parametrize(
    "text", ["", "min", "-1min", "1 parsec", "1.5steps", "100", 2, -0.1, True, "1min 2s", math.nan]
)
def test_no_spans(text: str | float) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


def test_a_bare_number_above_one_is_told_to_be_steps() -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration("100")
    assert caught.value.remedy == 'For steps write "100steps".'


def test_spans_in_steps() -> None:
    length = {"total_steps": 1000, "steps_per_epoch": 12.5}
    assert Duration(steps=7).in_steps(**length) == 7  # type: ignore[arg-type]
    assert Duration(epochs=2).in_steps(**length) == 25  # type: ignore[arg-type]
    assert Duration(fraction=0.05).in_steps(**length) == 50  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="10:00 is wall time"):
        Duration(seconds=600).in_steps(**length)  # type: ignore[arg-type]


def test_spans_are_printed_in_their_unit() -> None:
    spans = [Duration(seconds=90), Duration(steps=3), Duration(epochs=0.5), Duration(fraction=0.05)]
    assert [str(each) for each in spans] == ["1:30", "3 steps", "0.5 epochs", "5 % of the run"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (26 * 2**20, "26 MiB"), (2**50, "1024 TiB")]
)
def test_printed_sizes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (999.6, "1 k"), (14_200, "14.2 k"), (6_400_000, "6.4 M"), (7e12, "7 T")]
)
def test_printed_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.31, "0.31 s"), (59, "59 s"), (60, "1:00"), (792, "13:12"), (7509, "2:05:09")]
)
def test_printed_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9.9e-4, "9.9e-4"), (0.61, "0.61"), (256, "256"), (1234.5, "1234"), (12345, "1.23e4"), (-1e-9, "-1e-9")],
)
def test_printed_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_every_number_can_be_printed(value: float) -> None:
    printed = [each(value) for each in (format_number, format_count, format_bytes, format_seconds)]
    assert all(printed)
    if not math.isfinite(value):
        assert all(str(value) in text for text in printed)


@given(st.floats(min_value=1e-30, max_value=1e30))
def test_a_printed_number_is_right_to_three_digits(value: float) -> None:
    assert float(format_number(value)) == pytest.approx(value, rel=0.0051)
