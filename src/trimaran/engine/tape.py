"""Records a model's constructor: its tensors look as if on the CPU, and are on the meta device, without values.

Tensors made from Python's or NumPy's numbers stay real, and what is computed from them alone is computed at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trimaran.engine.history import History, View, fills_its_storage
from trimaran.errors import JobError

_META, _CPU = torch.device("meta"), torch.device("cpu")
_ATEN = torch.ops.aten

# These give memory without a value; the replay makes it where it is first needed.
_ALLOCATORS = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
# These write every element of their first argument and look at none: what was in it before need not be replayed.
_OVERWRITERS = {
    *(_ATEN.zero_, _ATEN.fill_, _ATEN.copy_, _ATEN.normal_, _ATEN.uniform_, _ATEN.exponential_, _ATEN.log_normal_),
    *(_ATEN.cauchy_, _ATEN.geometric_, _ATEN.random_, _ATEN.bernoulli_),
}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextmanager
def recording(history: History) -> Iterator[None]:
    """What runs inside is noted in `history` and not computed. Raises JobError for what could not be replayed."""
    tape = _Tape(history)
    state = torch.default_generator.get_state()
    with _truncated_normals(tape), _explained(), _AsOnCpu(tape), tape:
        yield
    if not torch.equal(torch.default_generator.get_state(), state):
        raise _refusal("seeds torch's generator, or draws from it out of sight", "Each draw has a seed of its own.")


class _Tape(TorchDispatchMode):
    """Sees every operation of torch, and notes those that write a value somewhere."""

    def __init__(self, history: History) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._history.is_replaying:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            tensors = _tensors((args, kwargs))
            is_recorded = not tensors or any(each.is_meta for each in tensors) or kwargs.get("device") == _META
            is_random = torch.Tag.nondeterministic_seeded in function.tags
            if not is_recorded and not is_random:
                return function(*args, **kwargs)
            if _needs_values(function, args) or (not is_random and _writes_into_real(function, args, kwargs)):
                args = tree_map_only(
                    Tensor, lambda each: self.read(each, _name(function)) if each.is_meta else each, args
                )
                return function(*args, **kwargs)
            return self._record(function, args, kwargs, is_random)

    def read(self, tensor: Tensor, what: str) -> Tensor:
        """The tensor's values, for a constructor that looks at them. Raises JobError where they will be drawn."""
        if not tensor.is_meta:
            return tensor
        view = self._view(tensor, what)
        if self._history.is_drawn(view):
            raise _refusal(
                f"looks at values that it has drawn: {what} of a tensor of shape {tuple(tensor.shape)}",
                "Weights are drawn after the constructor, each under its own seed.",
            )
        return self._history.value(view)

    def record_truncated_normal(self, function: Any, tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        """As one draw: torch repeats it until all values lie inside the bounds, and looks at them in between."""
        arguments = self._note(function, ((tensor, *args), {"generator": generator}))
        if not tensor.is_meta:
            raise _real_target(function)
        reads = [] if fills_its_storage(tensor) else [tensor]
        self._history.append(function, arguments, reads=reads, writes=[tensor], outputs=tensor, is_random=True)
        return tensor

    def _record(self, function: Any, args: Any, kwargs: dict[str, Any], is_random: bool) -> Any:
        packet = function.overloadpacket
        replayed = kwargs
        if any(argument.name == "device" for argument in function._schema.arguments):
            kwargs = {name: each for name, each in kwargs.items() if name != "pin_memory"} | {"device": _META}
            replayed = kwargs | {"device": _CPU}
        if packet is _ATEN.set_:  # gives the tensor another storage, and writes into none
            return function(*args, **kwargs)
        # Before the call, which may change its tensors' shapes.
        written = _written(function, args, kwargs)
        if not all(each.is_meta for each in written):
            raise _real_target(function)
        arguments = self._note(function, (args, replayed))
        is_overwritten = packet in _OVERWRITERS and fills_its_storage(args[0])
        read = _tensors((args[1:] if is_overwritten else args, kwargs))
        outputs = function(*_on_meta(args), **_on_meta(kwargs))
        made = self._history.keep(_dense(_tensors(outputs)))
        if written or (made and packet not in _ALLOCATORS):
            self._history.append(
                function,
                arguments,
                reads=[each for each in read if each.is_meta],
                writes=[*written, *made],
                outputs=outputs,
                is_random=is_random,
            )
        return outputs

    def _note(self, function: Any, arguments: Any) -> Any:
        """The arguments with views in place of recorded tensors, and copies of real ones, which may change."""
        if any(isinstance(each, torch.Generator) for each in tree_leaves(arguments)):
            raise _refusal(f"gives {_name(function)} its own generator", "Each draw has a seed of its own.")
        return tree_map_only(
            Tensor,
            lambda each: self._view(each, _name(function)) if each.is_meta else each.detach().clone(),
            arguments,
        )

    def _view(self, tensor: Tensor, what: str) -> View:
        try:
            return self._history.view(tensor)
        except KeyError:
            raise _refusal(
                f"gives {what} a tensor of shape {tuple(tensor.shape)} on the meta device that it has not computed",
                "Only what the constructor computes has a value.",
            ) from None


class _AsOnCpu(TorchFunctionMode):
    """Recorded tensors say that they are on the CPU, and give their values to Python and NumPy where they can."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape
        self._answers: dict[Any, Any] = {
            Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
            Tensor.device.__get__: _CPU,
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return function(*args, **kwargs)
        if function in self._answers:
            return self._answers[function]
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            return _unwritable(function(self._tape.read(args[0], _name(function)), *args[1:], **kwargs))
        if function == Tensor.data.__set__ and not args[1].is_meta:  # type: ignore[attr-defined]
            recorded = torch.empty_strided(args[1].shape, args[1].stride(), dtype=args[1].dtype).copy_(args[1])
            return function(args[0], recorded)
        if function is Tensor.new_tensor:  # on the meta device it would forget its values
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs)
        if function is Tensor.data_ptr:
            raise _refusal("asks for a tensor's address in memory", "Weights have memory after the constructor.")
        return function(*args, **kwargs)


@contextmanager
def _truncated_normals(tape: _Tape) -> Iterator[None]:
    # torch offers no hook: the function looks at values, and does nothing on the meta device.
    original = nn.init._no_grad_trunc_normal_

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return tape.record_truncated_normal(original, tensor, *args, **kwargs)

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
    except (RuntimeError, TypeError) as problem:
        if not re.search(r"\bmeta\b|incompatible tensor type", str(problem), re.IGNORECASE):
            raise
        raise _refusal(
            f"does what needs values: {str(problem).rstrip('.')}", "It is recorded before any weight has a value."
        ) from problem


def _refusal(what: str, rule: str) -> JobError:
    return JobError(f'With init="by_name" the model\'s constructor {what}.', rule, 'Use init="whole".')


def _real_target(function: Any) -> JobError:
    return JobError(
        f"With init=\"by_name\" {_name(function)} writes into a tensor made from Python's or NumPy's numbers.",
        "Those have their values at once, others when they are drawn.",
        'Make it with torch.empty, or use init="whole".',
    )


def _name(function: Any) -> str:
    return str(getattr(function, "overloadpacket", getattr(function, "__name__", function))).removeprefix("_no_grad_")


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _on_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda each: each if each.is_meta else each.to(_META), values)


def _dense(tensors: list[Tensor]) -> list[Tensor]:
    for each in tensors:
        if each.layout is not torch.strided:
            raise _refusal(f"makes a tensor of layout {each.layout}", "Dense tensors can be replayed.")
    return tensors


def _unwritable(values: Any) -> Any:
    """A write through NumPy would not reach the record."""
    if isinstance(values, np.ndarray):
        values.flags.writeable = False
    return values


def _needs_values(function: Any, args: Any) -> bool:
    """Whether the result is a number, or has a shape that depends on values."""
    if function.overloadpacket is _ATEN.index:  # by masks, or by whole numbers
        return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1:]))
    return not _VALUE_TAGS.isdisjoint(function.tags)


def _written(function: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that the call changes."""
    return [
        each
        for position, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for each in _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    ]


def _writes_into_real(function: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    written = _written(function, args, kwargs)
    return bool(written) and not any(each.is_meta for each in written)
