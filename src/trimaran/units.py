"""Bytes, durations, counts and rates: parsed from what people write, printed as people read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trimaran.errors import UsageError

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = {"step", "steps"}
_EPOCHS = {"epoch", "epochs"}


@dataclass(frozen=True)
class Duration:
    """A span in exactly one unit: wall seconds, optimizer steps, epochs, or a fraction of the run."""

    seconds: float | None = None
    steps: int | None = None
    epochs: float | None = None
    fraction: float | None = None

    def __str__(self) -> str:
        if self.seconds is not None:
            return format_seconds(self.seconds)
        if self.steps is not None:
            return f"{self.steps} steps"
        if self.epochs is not None:
            return f"{self.epochs:g} epochs"
        return f"{100 * (self.fraction or 0):g} % of the run"

    def in_steps(self, *, total_steps: int, steps_per_epoch: float) -> int:
        """Steps this span covers in a run; errors for wall time, which no step count answers."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return round(self.epochs * steps_per_epoch)
        if self.fraction is not None:
            return round(self.fraction * total_steps)
        raise UsageError(
            f"{self} is wall time.",
            "A length inside a schedule must not depend on how fast the machine is.",
            'Write it as "100steps", "1epoch" or a fraction such as 0.05.',
        )


def parse_bytes(text: str) -> int:
    """Bytes from "40 GiB", "1.5GB" or "512"."""
    number, unit = _split(text, 'a size such as "40 GiB"')
    if unit and unit not in _BYTES:
        raise UsageError(
            f"{text!r} has the unknown unit {unit!r}.",
            f"Known units of size: {', '.join(_BYTES)}.",
            'Write, for example, "40 GiB".',
        )
    return round(number * _BYTES.get(unit, 1))


def parse_duration(text: str | float | int) -> Duration:
    """A span from "10min", "200steps", "1epoch", or a fraction of the run such as 0.05."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _fraction(float(text), str(text))
    number, unit = _split(str(text), 'a span such as "10min", "200steps", "1epoch" or 0.05')
    if unit == "":
        return _fraction(number, str(text))
    if unit in _SECONDS:
        return Duration(seconds=number * _SECONDS[unit])
    if unit in _EPOCHS:
        return Duration(epochs=number)
    if unit in _STEPS:
        if number != int(number):
            raise UsageError(
                f"{text!r} is not a whole number of steps.",
                "Steps are counted.",
                f'Write "{round(number)}steps".',
            )
        return Duration(steps=int(number))
    raise UsageError(
        f"{text!r} has the unknown unit {unit!r}.",
        f"Known: {', '.join([*_SECONDS, 'steps', 'epochs'])}, or a bare fraction of the run.",
        'Write, for example, "10min" or "200steps".',
    )


def _fraction(value: float, text: str) -> Duration:
    if 0.0 <= value <= 1.0:
        return Duration(fraction=value)
    raise UsageError(
        f"{text} is not between 0 and 1.",
        "A bare number is a fraction of the run.",
        f'For steps write "{text}steps".',
    )


def _split(text: str, what: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise UsageError(
            f"{text!r} is not {what}.",
            "A quantity is a number that is not negative, followed by its unit.",
            f"Write {what}.",
        )
    number = float(match[1])
    if not math.isfinite(number):
        raise UsageError(f"{text!r} is too large.", "A quantity is finite.", f"Write {what}.")
    return number, match[2]


def format_bytes(count: float) -> str:
    """Bytes as "26 MiB" or "1.5 GiB": binary units, two digits where it is short."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or not math.isfinite(value):
            return f"{_short(value)} {unit}"
        value /= 1024
    return f"{_short(value)} TiB"


def format_count(count: float) -> str:
    """A count as "6.4 M" or "14.2 k": decimal prefixes, three digits."""
    value = float(count)
    for prefix in ("", " k", " M", " G"):
        if abs(value) < 999.5 or not math.isfinite(value):
            return f"{_short(value)}{prefix}"
        value /= 1000
    return f"{_short(value)} T"


def format_seconds(seconds: float) -> str:
    """A span as "0.31 s", "13:12" (minutes) or "2:05:09" (hours)."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{_short(seconds)} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_number(value: float) -> str:
    """A rate or loss scale as briefly as it stays exact to three digits: "9.9e-4", "0.61", "256"."""
    if value == 0:
        return "0"
    if not math.isfinite(value) or 1e-2 <= abs(value) < 999.5:
        return f"{value:.3g}"
    if 999.5 <= abs(value) < 1e4:
        return f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _short(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 10000:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}"
