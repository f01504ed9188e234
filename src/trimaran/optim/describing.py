"""One line for an optimizer's options, the same in every run of the same job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.units import format_number


def describe_call(name: str, options: Mapping[str, Any]) -> str:
    """The options as a call, such as "adamw(lr=3e-4, betas=(0.9, 0.95))"; None and empty collections are left out."""
    written = (f"{key}={_written(value)}" for key, value in options.items() if value not in (None, (), [], {}))
    return f"{name}({', '.join(written)})"


def _written(value: Any) -> str:
    if isinstance(value, float):  # in full where three digits round it: two rates that differ never read the same
        return format_number(value) if float(format_number(value)) == value else repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_written, value))})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
    return str(getattr(value, "__qualname__", value))
