"""A loss or metric of the user's own, from two functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimaran.errors import LossError

if TYPE_CHECKING:
    from trimaran.job import Batch, Loss

_RULE = "A loss is total(output, batch), a sum, and weight(batch), what that sum is divided by; both are scalars."


def custom(*, total: Callable[[Any, Any], Tensor], weight: Callable[[Any], Tensor | float]) -> Loss:
    """A loss or metric from `total(output, batch)`, a sum over samples, and `weight(batch)`, what it is divided by.

    For a mean over samples, total sums over them and weight counts them. `weight` sees no model output and may return
    a plain number. Raises LossError for what cannot be called so, and later for results that are not scalars.
    """
    _check_call("total", total, "lambda output, batch: ...", (None, None))
    _check_call("weight", weight, "lambda batch: ...", (None,))
    return _Custom(total, weight)


@dataclass(frozen=True, repr=False)
class _Custom:
    total_function: Callable[[Any, Any], Tensor]
    weight_function: Callable[[Any], Tensor | float]

    def weight(self, batch: Batch, /) -> Tensor:
        """The weight of this batch as a float64 scalar."""
        return _scalar(torch.as_tensor(self.weight_function(batch), dtype=torch.float64), "weight")

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """The sum over this batch, a scalar with its graph; halves are raised to float32."""
        value = self.total_function(output, batch)
        if not isinstance(value, Tensor):
            raise LossError(
                f"total returned {type(value).__name__}.",
                _RULE,
                "Return the tensor itself, without .item() or float().",
            )
        value = _scalar(value, "total")
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def __repr__(self) -> str:
        """Without addresses, so that two runs can be compared."""
        return f"custom(total={_name(self.total_function)}, weight={_name(self.weight_function)})"


def _check_call(option: str, function: Callable[..., Any], form: str, arguments: tuple[None, ...]) -> None:
    if not callable(function):
        raise LossError(f"custom({option}={function!r}).", _RULE, f"Write {option}={form}.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise LossError(
            f"custom({option}={_name(function)}) cannot be called so: {error}.", _RULE, f"Write {option}={form}."
        ) from None
    except ValueError:  # a function written in C, which does not tell its arguments
        return


def _scalar(value: Tensor, name: str) -> Tensor:
    if value.ndim:
        raise LossError(f"{name} returned a tensor of shape {list(value.shape)}.", _RULE, "Sum it: return value.sum().")
    return value


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
