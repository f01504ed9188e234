"""A constructor's record: what it computes is noted without being computed, and replayed for one tensor at a time.

The constructor sees its tensors as on the CPU. They are on the meta device and have no values; a tensor is known by its
place in a storage, and a storage's value is a graph of the operations that wrote into it. Tensors made from Python's or
NumPy's numbers stay real, and what is computed from them alone is computed at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trimaran.errors import JobError
from trimaran.world.rng import derive_seed

_META, _CPU = torch.device("meta"), torch.device("cpu")
_ATEN = torch.ops.aten

# These give a storage without a value; it is allocated where the replay first needs it.
_ALLOCATORS = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
# These write every element of their first argument and look at none: what was in it before need not be replayed.
_OVERWRITERS = {
    *(_ATEN.zero_, _ATEN.fill_, _ATEN.copy_, _ATEN.normal_, _ATEN.uniform_, _ATEN.exponential_, _ATEN.log_normal_),
    *(_ATEN.cauchy_, _ATEN.geometric_, _ATEN.random_, _ATEN.bernoulli_),
}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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


@dataclass
class _Operation:
    """One call that wrote into storages; its tensors are views, or constants."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[View | None]
    storages: frozenset[int]
    needs: frozenset[int]
    is_random: bool
    default_dtype: torch.dtype
    seed: int | None = None


class Tape(TorchDispatchMode):
    """Records the constructor that runs inside `recording()`; `value` replays what a tensor then holds."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, since they are known by their address
        self._last_writer: dict[int, int] = {}
        self._is_replaying = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what runs inside. Raises JobError for what cannot be replayed."""
        state = torch.default_generator.get_state()
        with _truncated_normals(self._record_truncated_normal), _explained(), _AsOnCpu(self), self:
            yield
        if not torch.equal(torch.default_generator.get_state(), state):
            raise _refusal(
                "seeds torch's generator, or draws from it out of sight", "Every draw has a seed of its own."
            )

    def view(self, tensor: Tensor) -> View:
        """The tensor's place. Raises KeyError where its storage was not made inside the record."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            raise KeyError(storage._cdata)
        return View(
            storage=storage._cdata,
            offset=tensor.storage_offset(),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            is_conjugated=tensor.is_conj(),
            is_negated=tensor.is_neg(),
        )

    def seed_draws(self, seed: int, views: Mapping[str, View]) -> None:
        """Gives each random draw a seed from (seed, name of the first of `views` that it reaches, how many before)."""
        for name, view in views.items():
            draws = [each for each in self._history(view) if each.is_random]
            word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
            for ordinal, draw in enumerate(draws):
                if draw.seed is None:
                    draw.seed = derive_seed(seed, word, ordinal)

    def value(self, view: View) -> Tensor:
        """The values at this place, on the CPU, in memory of their own and without gaps. Takes the draws' seeds."""
        self._is_replaying = True
        dtype = torch.get_default_dtype()
        try:
            with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]), torch.no_grad():
                return self._replay(view)
        finally:
            torch.set_default_dtype(dtype)
            self._is_replaying = False

    def read(self, tensor: Tensor, what: str) -> Tensor:
        """The values of a recorded tensor, for a constructor that looks at them. Raises JobError where they are drawn."""
        view = self._known(tensor, what)
        if any(each.is_random for each in self._history(view)):
            raise _refusal(
                f"looks at values that it has drawn: {what} of a tensor of shape {tuple(tensor.shape)}",
                "Weights are drawn after the constructor, each under its own seed.",
            )
        return self.value(view)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_replaying:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            tensors = _tensors((args, kwargs))
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            is_recorded = any(each.is_meta for each in tensors) or not tensors or kwargs.get("device") == _META
            if not (is_recorded or is_random):
                return function(*args, **kwargs)
            if _VALUE_TAGS & set(function.tags) and _needs_values(function, args):
                return function(*tree_map_only(Tensor, lambda each: self._real(each, function), args), **kwargs)
            return self._record(function, args, kwargs, is_random)

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], is_random: bool) -> Any:
        packet = function.overloadpacket
        takes_device = any(argument.name == "device" for argument in function._schema.arguments)
        if takes_device:
            kwargs |= {"device": _META}
            kwargs.pop("pin_memory", None)
        if packet is _ATEN.set_:  # gives the tensor another storage, and writes into none
            return function(*args, **kwargs)
        written = list(_written(function, args, kwargs))
        # Before the call, which may change its tensors' shapes.
        noted = self._note(function, (args, kwargs | {"device": _CPU} if takes_device else kwargs))
        reads = _tensors((args[1:], kwargs)) if self._overwrites(packet, args) else _tensors((args, kwargs))
        outputs = function(*_on_meta(args), **_on_meta(kwargs))
        made = [each for each in _tensors(outputs) if self._is_new(each)]
        for each in made:
            self._storages[each.untyped_storage()._cdata] = each.untyped_storage()
        if written or (made and packet not in _ALLOCATORS):
            self._append(function, noted, reads, [*written, *made], tree_leaves(outputs), is_random)
        return outputs

    def _record_truncated_normal(self, function: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        """As one draw: torch draws until all values lie inside the bounds, and looks at them in between."""
        noted = self._note(function, ((tensor, *args), {"generator": generator}))
        if not tensor.is_meta:
            raise _real_target(function)
        self._append(function, noted, [] if _fills_its_storage(tensor) else [tensor], [tensor], [], True)
        return tensor

    def _append(
        self,
        function: Callable[..., Any],
        noted: Any,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        outputs: list[Any],
        is_random: bool,
    ) -> None:
        storages = {each.untyped_storage()._cdata for each in writes}
        sources = {each.untyped_storage()._cdata for each in reads if each.is_meta}
        operation = _Operation(
            function=function,
            arguments=noted,
            outputs=[self.view(each) if isinstance(each, Tensor) else None for each in outputs],
            storages=frozenset(storages | {each.storage for each in tree_leaves(noted) if isinstance(each, View)}),
            needs=frozenset(self._last_writer[each] for each in sources if each in self._last_writer),
            is_random=is_random,
            default_dtype=torch.get_default_dtype(),
        )
        self._last_writer |= dict.fromkeys(storages, len(self._operations))
        self._operations.append(operation)

    def _note(self, function: Any, values: Any) -> Any:
        """The call's arguments with views in place of recorded tensors, and copies of real ones, which may change."""
        if any(isinstance(each, torch.Generator) for each in tree_leaves(values)):
            raise _refusal(
                f"draws from a generator of its own ({_name(function)})", "Every draw has a seed of its own."
            )
        return tree_map_only(
            Tensor, lambda each: self._known(each, _name(function)) if each.is_meta else each.detach().clone(), values
        )

    def _known(self, tensor: Tensor, what: str) -> View:
        try:
            return self.view(tensor)
        except (KeyError, NotImplementedError) as problem:  # the latter: no strided tensor
            raise _refusal(
                f"gives {what} a tensor of shape {tuple(tensor.shape)} whose values are not recorded",
                "A record knows dense tensors that were made in it.",
            ) from problem

    def _is_new(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            raise _refusal(f"makes a tensor of layout {tensor.layout}", "A record knows dense tensors.")
        return tensor.is_meta and tensor.untyped_storage()._cdata not in self._storages

    def _overwrites(self, packet: Any, args: Any) -> bool:
        return packet in _OVERWRITERS and args[0].is_meta and _fills_its_storage(args[0])

    def _real(self, tensor: Tensor, function: Any) -> Tensor:
        return self.read(tensor, _name(function)) if tensor.is_meta else tensor

    def _needed(self, view: View) -> list[int]:
        """The operations behind a value, in order: those that wrote it, and wrote what they read."""
        found: set[int] = set()
        todo = [self._last_writer[view.storage]] if view.storage in self._last_writer else []
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo.extend(self._operations[index].needs)
        return sorted(found)

    def _history(self, view: View) -> list[_Operation]:
        return [self._operations[index] for index in self._needed(view)]

    def _replay(self, view: View) -> Tensor:
        operations = self._history(view)
        last_use = {storage: index for index, each in enumerate(operations) for storage in each.storages}
        memory: dict[int, torch.UntypedStorage] = {}
        for index, operation in enumerate(operations):
            self._repeat(operation, memory)
            for storage in operation.storages - {view.storage}:
                if last_use[storage] == index:
                    memory.pop(storage, None)
        value = self._load(view, memory)
        return value if _fills_its_storage(value) else clone_dense(value)

    def _repeat(self, operation: _Operation, memory: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map_only(
            (View, Tensor),
            lambda each: self._load(each, memory) if isinstance(each, View) else each.clone(),
            operation.arguments,
        )
        if operation.is_random:
            assert operation.seed is not None
            torch.default_generator.manual_seed(operation.seed)
        torch.set_default_dtype(operation.default_dtype)
        results = operation.function(*args, **kwargs)
        for view, result in zip(operation.outputs, tree_leaves(results), strict=False):
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


class _AsOnCpu(TorchFunctionMode):
    """Recorded tensors say that they are on the CPU, and give their values to NumPy and Python where they can."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._answers: dict[Any, Callable[[], Any]] = {
            Tensor.is_meta.__get__: lambda: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: lambda: _CPU,  # type: ignore[attr-defined]
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return function(*args, **kwargs)
        if function in self._answers:
            return self._answers[function]()
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            return _frozen(function(self._tape.read(args[0], _name(function)), *args[1:], **kwargs))
        if function is Tensor.new_tensor:  # on the meta device it would forget its values
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs)
        if function is Tensor.data_ptr:
            raise _refusal("asks for a tensor's address in memory", "Weights have memory after the constructor.")
        return function(*args, **kwargs)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill their span of memory, each once, in whatever order of dimensions."""
    return torch.empty_like(tensor).stride() == tensor.stride()


def clone_dense(tensor: Tensor) -> Tensor:
    """A copy in memory of its own; contiguous where the tensor has gaps, else in the same order of dimensions."""
    return tensor.clone() if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def _truncated_normals(record: Callable[..., Tensor]) -> Iterator[None]:
    original = nn.init._no_grad_trunc_normal_

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return record(original, tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _explained() -> Iterator[None]:
    """Raises what torch says of tensors without values as a JobError."""
    try:
        yield
    except (RuntimeError, TypeError, NotImplementedError) as problem:
        if "meta" not in str(problem).lower():
            raise
        raise _refusal(
            f"does what is not possible without values: {problem}", "It is recorded before any weight has a value."
        ) from problem


def _refusal(what: str, rule: str) -> JobError:
    return JobError(f'With init="by_name" the model\'s constructor {what}.', rule, 'Use init="whole".')


def _real_target(function: Any) -> JobError:
    return JobError(
        f"With init=\"by_name\" {_name(function)} writes into a tensor made from Python's or NumPy's numbers.",
        "Those have their values at once, others when they are drawn.",
        'Make it with torch.empty, or use init="whole".',
    )


def _frozen(values: Any) -> Any:
    """A write through NumPy would not reach the record."""
    if isinstance(values, np.ndarray):
        values.flags.writeable = False
    return values


def _name(function: Any) -> str:
    return str(getattr(function, "_overloadpacket", getattr(function, "__name__", function)))


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _on_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each if each.is_meta else each.to(_META), values)


def _needs_values(function: Any, args: Any) -> bool:
    """Indexing has one name for masks, whose shape depends on values, and for whole numbers."""
    if function.overloadpacket is not _ATEN.index:
        return True
    return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1:]))


def _written(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that the call changes. Raises JobError for a real one, which would have its value too early."""
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for each in _tensors(args[position] if position < len(args) else kwargs.get(argument.name)):
                if not each.is_meta:
                    raise _real_target(function)
                yield each


def _fills_its_storage(tensor: Tensor) -> bool:
    return is_dense(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()
