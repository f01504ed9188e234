"""First weights: a function of (seed, job), never of the layout or the host (invariant 1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trimaran.engine.history import History, is_dense
from trimaran.engine.recorded import RecordedModel
from trimaran.engine.tape import recording
from trimaran.errors import JobError
from trimaran.world.rng import seed_everything


def build_model(constructor: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model on the CPU, its constructor run under the seed as in plain PyTorch.

    Raises JobError where the constructor returns no module, one without a parameter to train, or parameters that
    have no value yet or share their memory.
    """
    seed_everything(seed)
    model = constructor()
    _check(model)
    _refuse_without_values(model)
    _make_dense(model)
    return model


def record_model(constructor: Callable[[], nn.Module], seed: int) -> RecordedModel:
    """The model on the meta device, and the values of its tensors on demand, each under (seed, its name).

    No collective; on every rank the same. Raises JobError as `build_model` does, and for a constructor that looks at
    values it has drawn, or does what else cannot be replayed for one tensor alone.
    """
    seed_everything(seed)
    history = History()
    with recording(history):
        model = constructor()
    _check(model)
    return RecordedModel(model, history, seed)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every floating-point parameter this type, in place; buffers too where it is float64.

    Complex parameters take the type whose parts are of this one.
    """
    for parameter in model.parameters():
        _cast(parameter, dtype)
    if dtype is torch.float64:
        for buffer in model.buffers():
            _cast(buffer, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> None:
    wanted = dtype.to_complex() if tensor.is_complex() else dtype
    if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != wanted:
        # In place of a new tensor, so that whatever is shared between modules stays shared.
        tensor.data = tensor.data.to(wanted)


def _check(model: nn.Module) -> None:
    """Raises JobError for what cannot be trained or saved, whether or not its tensors have values yet."""
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model() returned {type(model).__name__}.",
            "It builds the torch module that is trained.",
            "Return an nn.Module.",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError(
            f"{type(model).__name__} has no parameter that requires a gradient.",
            "Training changes parameters.",
            "Set requires_grad on those to be trained.",
        )
    _refuse_without_shapes(model)
    _refuse_unsaveable(model)
    _refuse_shared_memory(model)


def _refuse_without_shapes(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise JobError(
                f"{name} has no shape yet (a lazy module).",
                "Weights exist before the first batch, so that they depend on the seed alone.",
                "Use the module with explicit sizes.",
            )


def _refuse_without_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise JobError(
                f"{name} is on the meta device.",
                'With init="whole" the constructor gives the weights their values.',
                "Build the model on the CPU.",
            )


def _refuse_unsaveable(model: nn.Module) -> None:
    """Before training: its end, which writes the weights, would be late to find out."""
    for name, each in model.state_dict().items():
        if not isinstance(each, Tensor) or each.layout is not torch.strided:
            what = f"a tensor of layout {each.layout}" if isinstance(each, Tensor) else type(each).__name__
            raise JobError(
                f"{name} of the model's state_dict is {what}.",
                "What is saved with a model is written as safetensors, which hold dense tensors.",
                "Keep it out of the state_dict: register_buffer(..., persistent=False), or no get_extra_state.",
            )


def _make_dense(model: nn.Module) -> None:
    """Copies parameters with gaps in memory, such as a slice of a tensor: fused optimizers know of no gaps."""
    for parameter in model.parameters():
        if not is_dense(parameter):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


def _refuse_shared_memory(model: nn.Module) -> None:
    """Two parameters in one memory stay tied or not as the precision and the device have it."""
    owners: dict[tuple[int, int], str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        owner = owners.setdefault(_address(parameter), name)
        if owner != name:
            raise JobError(
                f"the parameters {owner} and {name} are two, and share their memory.",
                "Weights are tied by being one parameter: another precision or device would untie these.",
                "Assign the parameter itself, as in head.weight = embed.weight, and not its .data.",
            )


def _address(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_meta:
        return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr(), 0
