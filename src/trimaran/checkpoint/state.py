"""What a run's tensors are called in a checkpoint: those of the model and, by parameter name, the optimizer's."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.checkpoint.packing import pack, unpack
from trimaran.checkpoint.parts import whole_shape
from trimaran.checkpoint.reading import CheckpointReader
from trimaran.errors import CheckpointError
from trimaran.tensor_plan import DealtRows

MODEL, OPTIMIZER = "model.", "optimizer."
_ENGINE_SETS = ("params", "lr", "base_lr", "initial_lr", "param_names")


@dataclass(frozen=True)
class NamedState:
    """Tensors by their names in a checkpoint, live ones, and the plain values beside them.

    `orders` are those in which tensors' rows lie on the ranks, where they are not the model's.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    orders: dict[str, DealtRows] = field(default_factory=dict)


class StateNames:
    """Names the state of one model and its optimizer; to be made before the first step, and kept.

    Options of a parameter group that the optimizer itself has changed since are state; the others are the job's.
    `updated` is what the optimizer holds, by name, where that is not the model's parameters but a rank's numbers of
    them; `dealt` are the orders of parameters' rows on the ranks, by name, where they are not the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        updated: Mapping[str, nn.Parameter] | None = None,
        dealt: Mapping[str, DealtRows] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters = dict(model.named_parameters())
        self._updated = self._parameters if updated is None else updated
        self._names = {parameter: name for name, parameter in self._updated.items()}
        self._dealt = dealt or {}
        self._options = [self._pack_options(group) for group in optimizer.param_groups]

    def collect(self) -> NamedState:
        """The state as it is now; its tensors are those in use. Raises CheckpointError for what cannot be saved."""
        state = NamedState()
        self._collect_model(state)
        self._collect_optimizer(state)
        return state

    def restore(self, reader: CheckpointReader, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Puts a checkpoint's tensors and values in place of the present ones.

        Raises CheckpointError where names, shapes or the optimizer are others; what was restored by then is lost.
        """
        restore_model(self._model, reader, model, self._dealt)
        self._restore_optimizer(reader, optimizer)

    def _collect_model(self, state: NamedState) -> None:
        tensors, extra = _split(self._model)
        _refuse_copies(self._model, tensors)
        first_names = find_ties(self._model, tensors)
        for name, tensor in tensors.items():
            first = first_names[name]
            if first == name:
                state.tensors[MODEL + name] = tensor
                if name in self._dealt:
                    state.orders[MODEL + name] = self._dealt[name]
            else:
                state.aliases[MODEL + name] = MODEL + first
        for name, value in extra.items():
            within: dict[str, Tensor] = {}
            state.model[name] = pack(value, name, within)
            state.tensors.update({MODEL + key: tensor for key, tensor in within.items()})

    def _collect_optimizer(self, state: NamedState) -> None:
        if type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            _refuse_own_state(self._optimizer)
        tensors: dict[str, Tensor] = {}
        parameters: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for owner, entries in self._optimizer.state.items():
            owner_key: Any = owner  # torch says Tensor; some optimizers keep what is shared under a string
            name = self._names.get(owner_key)
            if name is None and not isinstance(owner_key, str):
                raise CheckpointError(
                    f"{type(self._optimizer).__name__} keeps state for {_describe(owner)}.",
                    "Optimizer state is saved by the names of the model's parameters.",
                    "Use an optimizer that keeps its state by parameter.",
                )
            if name is not None:
                entries = {key: self._whole(name, value) for key, value in entries.items()}
            within: dict[str, Tensor] = {}
            packed = pack(entries, name or f"*{owner}", within)
            tensors |= within
            if name is not None and name in self._dealt:
                cut = (key for key, tensor in within.items() if isinstance(tensor, DTensor))
                state.orders.update({OPTIMIZER + key: self._dealt[name] for key in cut})
            (parameters if name is not None else shared)[name or owner_key] = packed
        changed = []
        for group, before in zip(self._optimizer.param_groups, self._options, strict=True):
            values = {}
            for key, (packed, within) in self._pack_options(group).items():
                if within or key not in before or packed != before[key][0]:
                    values[key] = packed
                    tensors |= within
            if values and group["params"]:
                changed.append({"params": [self._names[each] for each in group["params"]], "values": values})
        kind = type(self._optimizer)
        state.optimizer.update(
            kind=f"{kind.__module__}.{kind.__qualname__}", parameters=parameters, shared=shared, groups=changed
        )
        state.tensors.update({OPTIMIZER + key: tensor for key, tensor in tensors.items()})

    def _restore_optimizer(self, reader: CheckpointReader, values: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        _check_form(values)
        if values["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint's optimizer is {reprlib.repr(values['kind'])}; this job has {kind}.",
                "An optimizer's state belongs to that optimizer.",
                "Keep the optimizer, or take the weights alone with --from.",
            )
        for name, packed in values["parameters"].items():
            if name not in self._updated:
                continue  # of another pipeline stage; a model without it was refused by its weights
            parameter, updated = self._parameters[name], self._updated[name]
            group = next(each for each in optimizer.param_groups if any(one is updated for one in each["params"]))
            read = partial(
                _read_beside, reader, owner=name, parameter=parameter, group=group, order=self._dealt.get(name)
            )
            state = unpack(packed, read)
            if updated is not parameter:
                state = {key: _own_numbers(value) for key, value in state.items()}
            optimizer.state[updated] = state
        for key, packed in values["shared"].items():
            shared_key: Any = key
            optimizer.state[shared_key] = unpack(packed, lambda name: reader.read(OPTIMIZER + name))
        for group in optimizer.param_groups:
            names = {self._names[each] for each in group["params"]}
            for saved in values["groups"]:
                if names & set(saved["params"]):
                    for key, packed in saved["values"].items():
                        if key in _ENGINE_SETS:
                            continue
                        group[key] = unpack(packed, lambda name: reader.read(OPTIMIZER + name))
                    break

    def _whole(self, name: str, value: Any) -> Any:
        """A value of a parameter's state; this rank's numbers of it as what they are, a part of the whole."""
        parameter, updated = self._parameters[name], self._updated[name]
        if updated is parameter or not isinstance(value, Tensor) or value.shape != updated.shape:
            return value
        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def _pack_options(self, group: Mapping[str, Any]) -> dict[str, tuple[Any, dict[str, Tensor]]]:
        """The group's options as JSON and tensors; what cannot be packed is the job's own (a function), never state."""
        first = self._names[group["params"][0]] if group["params"] else ""
        options = {}
        for key, value in group.items():
            if key in _ENGINE_SETS:
                continue
            within: dict[str, Tensor] = {}
            try:
                options[key] = (pack(value, f"*group.{first}.{key}", within), within)
            except CheckpointError:
                continue
        return options


def restore_model(
    model: nn.Module,
    reader: CheckpointReader,
    extra: Mapping[str, Any] | None = None,
    dealt: Mapping[str, DealtRows] | None = None,
) -> None:
    """Copies a checkpoint's weights and persistent buffers into `model`, in its types and in its cut.

    `extra` is what modules keep as extra state; None leaves theirs. `dealt` as in
    `StateNames`. Raises CheckpointError that names what is missing or has another shape; the model is then as it was.
    """
    tensors, own_extra = _split(model)
    sources = {name: reader.find(MODEL + name) for name in tensors}
    missing = [name for name, source in sources.items() if source is None]
    found = {name: source for name, source in sources.items() if source is not None}
    misshaped = [
        f"{name} ({_shape(reader.shape(source))} saved, {_shape(whole_shape(tensors[name]))} here)"
        for name, source in found.items()
        if reader.shape(source) != whole_shape(tensors[name])
    ]
    for names, what in ((missing, "are not in the checkpoint"), (misshaped, "have another shape")):
        if names:
            raise CheckpointError(
                f"{len(names)} tensors of the model {what}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}.",
                "A checkpoint continues the model it was saved from.",
                "Give the model the arguments it was saved with.",
            )
    with torch.no_grad():
        for name, source in found.items():
            reader.read_into(tensors[name], source, (dealt or {}).get(name))
    if extra is not None and own_extra:
        packed = {name: extra[name] for name in own_extra if name in extra}
        values = {name: unpack(each, lambda key: reader.read(MODEL + key)) for name, each in packed.items()}
        model.load_state_dict(values, strict=False)


def _read_beside(
    reader: CheckpointReader,
    key: str,
    *,
    owner: str,
    parameter: Tensor,
    group: Mapping[str, Any],
    order: DealtRows | None,
) -> Tensor:
    """A tensor of a parameter's state: cut, strided and placed like the parameter where it has its shape.

    It keeps its type, except that one which had the parameter's type has it still where that is now another
    (fp32 continued as fp64). A count of steps stays on the host where torch's optimizers keep it there.
    Raises CheckpointError for another shape than fused kernels take: they write beyond a tensor that is too short.
    """
    name = OPTIMIZER + key
    dtype, shape, is_complex = reader.dtype(name), reader.shape(name), reader.is_complex(name)
    if key.endswith(".step") and shape == ():
        on_host = not (group.get("fused") or group.get("capturable"))
        return reader.read(name).to("cpu" if on_host else parameter.device)
    if shape != whole_shape(parameter) or is_complex != parameter.is_complex():
        if group.get("fused"):
            raise CheckpointError(
                f"{reprlib.repr(key)} is {_shape(shape)}, beside a parameter that is {_shape(whole_shape(parameter))}.",
                "What a fused optimizer keeps for a parameter has its shape.",
                "Use another checkpoint.",
            )
        return reader.read(name).to(parameter.device)
    saved_as = reader.find(MODEL + owner)
    if saved_as is not None and reader.dtype(saved_as) == dtype and dtype.is_floating_point:
        dtype = parameter.dtype
    elif is_complex:
        dtype = dtype.to_complex()
    # Strides too: fused kernels go through parameter and state side by side, and do not look at strides.
    like = torch.empty_like(parameter.detach(), dtype=dtype)
    reader.read_into(like, name, order)
    return like


def _check_form(values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for optimizer values of another form than `collect` gives."""
    match values:
        case {"kind": str(), "parameters": dict(parameters), "shared": dict(), "groups": list(groups)}:
            of_parameters = all(isinstance(each, dict) and "dict" in each for each in parameters.values())
            if of_parameters and all(map(_is_group, groups)):
                return
    raise CheckpointError(
        "the checkpoint's optimizer state is not of the form in which it is saved.",
        "It has a kind, values by parameter, shared ones, and those of groups.",
        "Use another checkpoint.",
    )


def _is_group(group: Any) -> bool:
    match group:
        case {"params": list(names), "values": dict()}:
            return all(isinstance(name, str) for name in names)
    return False


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's state_dict as its tensors and the modules' extra state."""
    state = model.state_dict()
    extra = {name: value for name, value in state.items() if name.rpartition(".")[2] == "_extra_state"}
    return {name: value.detach() for name, value in state.items() if name not in extra}, extra


def _refuse_copies(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError where what the model gives to save is not what it computes with.

    Loading writes into these tensors; into a copy it would be lost without a word.
    """
    own = {_storage(each) for each in (*model.parameters(), *model.buffers())}
    copies = [name for name, each in tensors.items() if each.numel() and _storage(each) not in own]
    if copies:
        raise CheckpointError(
            f"the model's state_dict() gives copies: {', '.join(copies[:5])}{' …' if len(copies) > 5 else ''}.",
            "A checkpoint is read into the tensors of the model's state_dict(), which are its parameters and buffers.",
            "Drop the hook, or the _save_to_state_dict, that clones, casts or moves them.",
        )


def _refuse_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointError for an optimizer that keeps more than `state` and `param_groups`."""
    more = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
    if more:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {', '.join(more)} beside its state and param_groups.",
            "A checkpoint holds an optimizer's state by parameter, and what it changes in its groups.",
            "Keep it in state[parameter], in a group, or under a string in state.",
        )


def _own_numbers(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _storage(tensor: Tensor) -> object:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr(), local.device


def find_ties(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name of the same tensor, for what the model's state_dict() gave."""
    # What is cut may be empty on this rank, where it has no place in memory: the model says which are one.
    owners = dict(model.named_parameters(remove_duplicate=False))
    places: dict[object, str] = {}
    first_names = {}
    for name, tensor in tensors.items():
        place: object = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if isinstance(tensor, DTensor):
            place = id(owners.get(name, tensor))
        first_names[name] = places.setdefault(place, name) if tensor.numel() else name
    return first_names


def _describe(owner: object) -> str:
    return f"a tensor of shape {tuple(owner.shape)} that is no parameter" if isinstance(owner, Tensor) else repr(owner)


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"
