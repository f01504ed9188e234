"""Nested state of any optimizer as JSON and named tensors, and back, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from trimaran.errors import CheckpointError

_TENSOR, _FLOAT = "tensor", "float"
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict}


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
    for name, kind in _CONTAINERS.items():
        if type(value) is not kind:
            continue
        if kind is dict and not all(isinstance(each, str) for each in iter(value)):
            break
        entries: Iterable[tuple[Any, Any]] = value.items() if kind is dict else enumerate(value)
        packed = [[str(each), pack(inner, f"{key}.{each}", tensors)] for each, inner in entries]
        return {name: packed}
    raise CheckpointError(
        f"{key} is {value!r}, a {type(value).__name__}.",
        "A checkpoint holds tensors, numbers, strings, and lists, tuples and dicts of them: nothing that runs.",
        "Keep such a value out of the state, or as a tensor.",
    )


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
    return dict(inner) if kind == "dict" else _CONTAINERS[kind](each for _, each in inner)
