"""A model whose constructor was recorded: no values yet, and any of them on demand (Job.init="by_name")."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimaran.engine.history import History, View, clone_dense, is_dense
from trimaran.errors import JobError

Place = Callable[[str, Tensor, Tensor], Tensor]
"""(name, whole value on the CPU, the model's tensor on meta) -> what the model keeps in its place."""

_REGISTERED = ("_parameters", "_buffers", "_modules")


class RecordedModel:
    """`model` has all its parameters and buffers on the meta device, tied as the constructor tied them.

    `replay` gives the value of one of them, which depends on the seed and its name and on nothing that happened to
    others; `fill` gives the model all of them, one at a time. Nothing here is a collective.
    """

    def __init__(self, model: nn.Module, history: History, seed: int) -> None:
        self.model = model
        self._history = history
        named = list(_named_tensors(model))
        self._sources = {name: _source(name, tensor, history) for name, tensor in named}
        history.seed_draws(seed, {name: each for name, each in self._sources.items() if isinstance(each, View)})
        tensors = {id(tensor): tensor for _, tensor in named}
        _replace(model, {identity: _as_meta(tensor) for identity, tensor in tensors.items()})

    def replay(self, name: str) -> Tensor:
        """The whole value of this parameter, buffer or attribute, new memory on the CPU; the same at every call."""
        source = self._sources[name]
        return self._history.value(source) if isinstance(source, View) else clone_dense(source.detach())

    def fill(self, place: Place | None = None) -> nn.Module:
        """The model with every tensor replayed and put in place; at most one whole tensor exists beside those kept.

        `place` turns a whole value into what is kept, such as this rank's shard; without it the value itself is.
        """
        place = place or _whole
        filled: dict[int, Tensor] = {}
        named = list(_named_tensors(self.model))  # kept, so that no identity is used twice
        for name, tensor in named:
            if id(tensor) not in filled:
                # In one expression: a name for the whole value would keep it while the next one is made.
                filled[id(tensor)] = _like(tensor, place(name, self.replay(name), tensor))
        _replace(self.model, filled)
        return self.model


def _whole(name: str, value: Tensor, tensor: Tensor) -> Tensor:
    return value


def _source(name: str, tensor: Tensor, history: History) -> View | Tensor:
    """Where a tensor's value comes from: a place in the record, or itself where it is made of numbers alone."""
    try:
        return history.view(tensor) if tensor.is_meta else tensor
    except KeyError:
        raise JobError(
            f"{name} is on the meta device.",
            "The constructor gives the weights their values.",
            "Build all of the model inside model().",
        ) from None


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, then tensors that are plain attributes; tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _REGISTERED:
                for index, each in enumerate(tree_flatten(value)[0]):
                    if isinstance(each, Tensor):
                        yield f"{path}.{key}.{index}".lstrip("."), each


def _replace(model: nn.Module, others: dict[int, Tensor]) -> None:
    """Puts another tensor in the place of each that is named by its identity, wherever modules hold it."""
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for key, each in registry.items():
                if each is not None:
                    registry[key] = others.get(id(each), each)  # type: ignore[assignment]
        for key, value in list(vars(module).items()):
            if key not in _REGISTERED:
                leaves, structure = tree_flatten(value)
                if any(id(each) in others for each in leaves):
                    vars(module)[key] = tree_unflatten([others.get(id(each), each) for each in leaves], structure)


def _as_meta(tensor: Tensor) -> Tensor:
    """The tensor itself, or one like it without a value and without gaps in memory."""
    if tensor.is_meta and is_dense(tensor):
        return tensor
    if is_dense(tensor):
        return _like(tensor, torch.empty_like(tensor, device="meta"))
    return _like(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` in the role of `tensor`: a parameter where that is one, with the attributes that modules gave it."""
    if isinstance(tensor, nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    elif value.requires_grad != tensor.requires_grad:
        value.requires_grad_(tensor.requires_grad)
    vars(value).update(vars(tensor))
    return value
