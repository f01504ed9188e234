"""What a recorded constructor wrote where, as a graph; any tensor's values from it, on the CPU.

A tensor is known by its place in a storage. A storage's value follows from the operations that wrote into it, and from
those that wrote what they read; what came later, or was overwritten, is not replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from trimaran.world.rng import derive_seed


@dataclass(frozen=True)
class View:
    """A tensor as a place in a recorded storage."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conjugated: bool
    is_negated: bool


@dataclass(eq=False)
class _Operation:
    """One call that wrote into storages; its tensors are views, or constants. `needs` are the calls it builds on."""

    function: Callable[..., Any]
    arguments: Any
    outputs: list[View | None]
    storages: frozenset[int]
    needs: frozenset[int]
    is_random: bool
    default_dtype: torch.dtype
    seed: int | None = None


class History:
    """The operations of one constructor, in order, and the storages they wrote into."""

    def __init__(self) -> None:
        self.is_replaying = False
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, since they are known by their address
        self._last_writer: dict[int, int] = {}

    def view(self, tensor: Tensor) -> View:
        """The tensor's place. Raises KeyError where its storage was not made inside the record."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages:
            raise KeyError(storage)
        return View(
            storage=storage,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            is_conjugated=tensor.is_conj(),
            is_negated=tensor.is_neg(),
        )

    def keep(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Takes in the storages that are new; those tensors that have one."""
        new = [each for each in tensors if each.untyped_storage()._cdata not in self._storages]
        self._storages |= {each.untyped_storage()._cdata: each.untyped_storage() for each in new}
        return new

    def append(
        self,
        function: Callable[..., Any],
        arguments: Any,
        *,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        outputs: Any,
        is_random: bool,
    ) -> None:
        """Adds a call. `arguments` has views and constants; the tensors are on meta, and known.

        What is written and not read counts as overwritten as a whole.
        """
        written = {each.untyped_storage()._cdata for each in writes}
        read = {each.untyped_storage()._cdata for each in reads}
        operation = _Operation(
            function=function,
            arguments=arguments,
            outputs=[self.view(each) if isinstance(each, Tensor) else None for each in tree_leaves(outputs)],
            storages=frozenset(written | read),
            needs=frozenset(self._last_writer[each] for each in read if each in self._last_writer),
            is_random=is_random,
            default_dtype=torch.get_default_dtype(),
        )
        self._last_writer |= dict.fromkeys(written, len(self._operations))
        self._operations.append(operation)

    def is_drawn(self, view: View) -> bool:
        """Whether a random draw reaches this place."""
        return any(each.is_random for each in self._operations_behind(view))

    def seed_draws(self, seed: int, views: Mapping[str, View]) -> None:
        """Gives each draw a seed from (seed, name of the first of `views` that it reaches, how many reach that before).

        Thus a draw that reaches several has one value in all of them.
        """
        for name, view in views.items():
            word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
            draws = [each for each in self._operations_behind(view) if each.is_random]
            for ordinal, draw in enumerate(draws):
                if draw.seed is None:
                    draw.seed = derive_seed(seed, word, ordinal)

    def value(self, view: View) -> Tensor:
        """The values at this place, on the CPU, in memory of their own and without gaps."""
        dtype = torch.get_default_dtype()
        self.is_replaying = True
        try:
            with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]), torch.no_grad():
                value = self._replay(view)
        finally:
            self.is_replaying = False
            torch.set_default_dtype(dtype)
        return value

    def _operations_behind(self, view: View) -> list[_Operation]:
        found: set[int] = set()
        todo = [self._last_writer[view.storage]] if view.storage in self._last_writer else []
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo.extend(self._operations[index].needs)
        return [self._operations[index] for index in sorted(found)]

    def _replay(self, view: View) -> Tensor:
        operations = self._operations_behind(view)
        last_use = {storage: index for index, each in enumerate(operations) for storage in each.storages}
        memory: dict[int, torch.UntypedStorage] = {}
        for index, operation in enumerate(operations):
            self._repeat(operation, memory)
            for storage in operation.storages - {view.storage}:
                if last_use[storage] == index:
                    memory.pop(storage, None)
        value = self._load(view, memory)
        return value if fills_its_storage(value) else clone_dense(value)

    def _repeat(self, operation: _Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map_only(View, lambda view: self._load(view, memory), operation.arguments)
        if operation.is_random:
            assert operation.seed is not None, "draws have their seeds before any value"
            torch.default_generator.manual_seed(operation.seed)
        torch.set_default_dtype(operation.default_dtype)
        results = tree_leaves(operation.function(*args, **kwargs))
        for view, result in zip(operation.outputs, results, strict=True):
            if view is not None and view.storage not in memory:
                if (result.storage_offset(), result.stride()) == (view.offset, view.stride):
                    memory[view.storage] = result.untyped_storage()
                else:
                    self._load(view, memory).copy_(result)

    def _load(self, view: View, memory: dict[int, torch.UntypedStorage]) -> Tensor:
        if view.storage not in memory:
            # What the constructor leaves without a value is zero: anything else would differ from rank to rank.
            num_bytes = self._storages[view.storage].nbytes()
            memory[view.storage] = torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()
        value = torch.empty(0, dtype=view.dtype).set_(memory[view.storage], view.offset, view.shape, view.stride)
        value = torch._neg_view(value) if view.is_negated else value
        return torch._conj(value) if view.is_conjugated else value


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill their span of memory, each once, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def fills_its_storage(tensor: Tensor) -> bool:
    """Whether no byte of the tensor's storage is outside the tensor."""
    return is_dense(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()


def clone_dense(tensor: Tensor) -> Tensor:
    """A copy in memory of its own; contiguous where the tensor has gaps, else in the same order of dimensions."""
    return tensor.clone() if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)
