"""Nested state of any optimizer as JSON and named tensors, and back, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from trimaran.errors import CheckpointError

_TENSOR, _FLOAT = "tensor", "float"


def pack(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; the tensors in it are put into `tensors` under `key` and what leads to them.

    Raises CheckpointError for what is neither tensor, number, string nor a list, tuple or dict of such.
    """
    if isinstance(value, Tensor):
        tensors[key] = value
        return {_TENSOR: key}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    # Not their subclasses: a named tuple or a defaultdict would come back as another thing.
    if type(value) in (list, tuple):
        return {type(value).__name__: _pack_entries(enumerate(value), key, tensors)}
    if type(value) is dict and all(isinstance(each, str) for each in value):
        return {"dict": _pack_entries(value.items(), key, tensors)}
    raise CheckpointError(
        f"{key} is {value!r}, a {type(value).__name__}.",
        "A checkpoint holds tensors, numbers, strings, and lists, tuples and dicts of them: nothing that runs.",
        "Keep such a value out of the state, or as a tensor.",
    )


def _pack_entries(entries: Iterable[tuple[Any, Any]], key: str, tensors: dict[str, Tensor]) -> list[list[Any]]:
    return [[str(each), pack(inner, f"{key}.{each}", tensors)] for each, inner in entries]


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `pack` was given; `read` gives the tensor of a key."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == _TENSOR:
        return read(content)
    if kind == _FLOAT:
        return float(content)
    inner = [(key, unpack(each, read)) for key, each in content]
    if kind == "dict":
        return dict(inner)
    values = [each for _, each in inner]
    return tuple(values) if kind == "tuple" else values
