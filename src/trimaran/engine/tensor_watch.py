"""Finds collectives that nobody declared: DTensor gathers in silence what an operation cannot do on its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trimaran.engine.tensor_ops import PartwiseFunctions
from trimaran.errors import LayoutError

_WAITS = ("wait_tensor", "_wrap_tensor_autograd")


class Watch(TorchDispatchMode):
    """Inside, a collective in one of the model's blocks that is not a declared one raises LayoutError."""

    def __init__(self, functions: PartwiseFunctions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._functions = functions
        self._modules: list[str] = []
        self._num_declared = 0

    @contextmanager
    def declared(self) -> Iterator[None]:
        """What is inside was asked for."""
        self._num_declared += 1
        try:
            yield
        finally:
            self._num_declared -= 1

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows, inside, which module of the model is at work."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._modules.clear()

    def _leave(self) -> None:
        self._modules.pop()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        space, _, name = str(func).partition(".")
        name = name.partition(".")[0]
        if space in ("c10d", "_c10d_functional") and name not in _WAITS and not self._num_declared:
            where = self._modules[-1] if self._modules else ""
            if any(part.isdigit() for part in where.split(".")):
                raise _undeclared(where, self._functions.current, name)
        return func(*args, **(kwargs or {}))


def _undeclared(module: str, function: str, collective: str) -> LayoutError:
    what = "is summed over" if "reduce" in collective else "gathers a tensor from"
    return LayoutError(
        f"{function or 'an operation'} in {module} {what} all tensor ranks ({collective}).",
        "In a block, ranks meet only where the tp_plan says so: after a rowwise layer and, with sp, before a colwise "
        "one. Else every rank would do the work of all.",
        "Declare what the layer is (heads=, parts=), and a rowwise layer after each colwise one; or leave both out.",
    )
