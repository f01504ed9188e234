"""What a precision means, in every layout: the parameters' type, the compute type, and loss scaling.

fp64, fp32, tf32: parameters and compute in that width. bf16, fp16: master weights, gradients, optimizer state and
loss in float32; the forward under torch.autocast. docs/numerics.md has the whole statement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trimaran.layout import Precision

_AUTOCAST: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HALVES = (torch.bfloat16, torch.float16)


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The type of parameters, gradients and optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


def forward_context(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward: autocast for bf16 and fp16, nothing otherwise."""
    compute = _AUTOCAST.get(precision)
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=compute)


def upcast_output(output: Any) -> Any:
    """An output whose half-precision tensors are in float32, so that no loss sums in half precision."""
    return map_tensors(output, lambda tensor: tensor.float() if tensor.dtype in _HALVES else tensor)


def map_tensors(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """An output with each of its tensors replaced.

    Looks into tuples, lists, dicts, what else torch's pytrees know (Hugging Face's outputs), and dataclasses.
    """
    if is_dataclass(output) and not isinstance(output, Mapping | type):
        raised = copy(output)
        for each in fields(output):
            replaced = map_tensors(getattr(output, each.name), function)
            object.__setattr__(raised, each.name, replaced)  # frozen ones too
        return raised
    return tree_map_only(Tensor, function, output)


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed precision training", section 3.2).

    Halved when a step's norm is not finite, doubled after `growth_interval` steps in a row that were. The norm is
    that of the world, so every rank scales alike without asking. Host numbers: they change once per step.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    smallest: float = field(default=2.0**-14, repr=False)

    def update(self, *, skipped: bool) -> None:
        """Takes in whether the step was skipped."""
        if skipped:
            self.value = max(self.value / 2, self.smallest)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value *= 2
            self.good_steps = 0
