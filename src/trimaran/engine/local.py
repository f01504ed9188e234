"""This rank's own numbers of parameters that are cut over ranks: what the update works on.

An optimizer that treats each element by itself may as well see a rank's elements alone. They are plain tensors, on
which fused kernels are several times as fast as on torch's distributed ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.errors import LayoutError

_ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; a plain tensor is its own."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor._local_tensor  # to_local() would record it for autograd
        return local.detach()
    return tensor


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """A tensor cut as `like`, with `local` as this rank's part, in the same memory; where `like` is plain, `local`."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> a parameter with this rank's numbers, in the same memory; those that are not cut are the model's own."""
    return {
        name: nn.Parameter(local_tensor(each), requires_grad=each.requires_grad) if isinstance(each, DTensor) else each
        for name, each in model.named_parameters()
    }


def refuse_whole_tensor_optimizer(optimizer: torch.optim.Optimizer, layout: str) -> None:
    """Raises LayoutError for an optimizer that may look at more than one element at a time.

    A subclass may do so as well, so only torch's own classes are known.
    """
    if type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise LayoutError(
            f"{type(optimizer).__name__} with {layout}.",
            f"Where parameters are cut over ranks, each updates its own elements; of these it is known: {known}.",
            "Use one of them, or a layout that leaves parameters whole: zero=0, tp=1.",
        )
