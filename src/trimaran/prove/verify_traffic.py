"""Collectives and their bytes, counted where torch dispatches them: whoever asked for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_NO_TRAFFIC = ("wait", "barrier", "wrap_tensor")


@dataclass(frozen=True)
class Collectives:
    """How many of one kind a rank started, and the bytes of the whole tensors they made or took."""

    count: int
    num_bytes: int


class Traffic(TorchDispatchMode):
    """Counts the collectives that are started inside, by kind: "allreduce", "allgather_base", ..."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Collectives] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back as the collectives that it takes
        namespace, name, *_ = str(func).split(".")
        if namespace in _NAMESPACES and not any(word in name for word in _NO_TRAFFIC):
            kind = name.strip("_")
            before = self.found.get(kind, Collectives(0, 0))
            num_bytes = max((_bytes(each) for each in args), default=0)
            self.found[kind] = Collectives(before.count + 1, before.num_bytes + num_bytes)
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


def _bytes(argument: Any) -> int:
    """Of all tensors in one argument: what is gathered, or is to be scattered, is the largest of a collective's."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))
