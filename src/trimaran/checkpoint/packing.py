"""Nested state of any optimizer as JSON and named tensors, and back, exactly."""

from __future__ import annotations

import math
import reprlib
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
        while key in tensors:  # {"a.b": …} beside {"a": {"b": …}}
            key += "'"
        tensors[key] = value
        return {_TENSOR: key}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    kind = type(value)
    name = kind.__name__
    if _CONTAINERS.get(name) is kind and (name != "dict" or all(isinstance(each, str) for each in value)):
        entries: Iterable[tuple[Any, Any]] = value.items() if name == "dict" else enumerate(value)
        return {name: [[str(each), pack(inner, f"{key}.{each}", tensors)] for each, inner in entries]}
    raise CheckpointError(
        f"{key} is {reprlib.repr(value)}, a {name}.",
        "A checkpoint holds tensors, numbers, strings, and lists, tuples and dicts of them: nothing that runs.",
        "Keep such a value out of the state, or as a tensor.",
    )


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `pack` was given; `read` gives the tensor of a key. Raises CheckpointError for anything else."""
    match packed:
        case None | bool() | int() | float() | str():
            return packed
        case {"tensor": str(key)} if len(packed) == 1:
            return read(key)
        case {"float": "nan" | "inf" | "-inf" as text} if len(packed) == 1:
            return float(text)
        case {"list": list(content)} | {"tuple": list(content)} if len(packed) == 1:
            return _CONTAINERS[next(iter(packed))]([unpack(each, read) for _, each in _pairs(content)])
        case {"dict": list(content)} if len(packed) == 1:
            return {key: unpack(each, read) for key, each in _pairs(content)}
    raise _malformed(packed)


def _pairs(content: list[Any]) -> list[tuple[str, Any]]:
    for each in content:
        match each:
            case [str(), _]:
                continue
        raise _malformed(each)
    return [(key, value) for key, value in content]


def _malformed(packed: Any) -> CheckpointError:
    return CheckpointError(
        f"a value of the checkpoint's state is {reprlib.repr(packed)}.",
        "Values are tensors, numbers, strings, and lists, tuples and dicts of them, as they were packed.",
        "Use another checkpoint.",
    )
