"""Sharded data parallelism, ZeRO 1 to 3 and hybrid: one mechanism, torch's `fully_shard`, with three settings.

Every rank keeps 1/N of each parameter, of its gradient and of the optimizer's state between steps, whatever the stage
(Rajbhandari et al. 2020, arXiv 1910.02054, section 5). The stages differ within a step:

- 1: parameters are gathered once per step, gradients are summed and cut once, in the last micro-batch's backward;
- 2: gradients are summed and cut in every micro-batch's backward, so that no rank holds whole ones;
- 3: parameters are given back after each use, so that no rank holds whole ones but those of the block at work.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trimaran.world.groups import Mesh

_LARGEST_ORDER = 2**20
"""So small that squares of it, summed over a thousand ranks, are exact in float64."""


class Shards:
    """The shards of one model, in groups: one for each block, and one for the rest."""

    def __init__(self, model: nn.Module, *, stage: int) -> None:
        self._model = model
        self._stage = stage
        self._groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._used = 0
        for index, group in enumerate(self._groups):
            group.register_forward_pre_hook(partial(self._note_use, index))

    def take_in(self) -> None:
        """Gathers from now on what was put in place of the first parameters. Every rank must call it."""
        for group in self._groups:
            group.unshard()
            group.reshard()

    def take_order(self) -> int:
        """A number below 2^20 that tells in which order the groups were used since it was last asked.

        Ranks gather a group's parameters together, each time that it is used: they must agree.
        """
        order, self._used = self._used, 0
        return order

    def begin_micro_batch(self, *, last: bool) -> None:
        """Call before each forward; says whether this backward completes the step's gradients."""
        for group in self._groups:
            group.set_requires_gradient_sync(last or self._stage > 1, recurse=False)
            group.set_requires_all_reduce(last, recurse=False)
            group.set_reshard_after_backward(last or self._stage == 3, recurse=False)

    def begin_trial(self) -> None:
        """Call before a forward and backward whose gradients nobody wants: they stay whole, and on their rank."""
        for group in self._groups:
            group.set_requires_gradient_sync(False, recurse=False)
            group.set_reshard_after_backward(False, recurse=False)

    def drop_gradients(self) -> None:
        """Forgets what gradients are left of whole parameters, and gives these back."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self.give_back()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_use(self, index: int, module: nn.Module, inputs: object) -> None:
        self._used = (self._used * 31 + index + 1) % _LARGEST_ORDER

    def give_back(self) -> None:
        """Frees whole parameters. A forward without a backward leaves them, and they would not follow an update."""
        for group in self._groups:
            group.reshard()


def apply_shards(model: nn.Module, mesh: Mesh, *, stage: int, blocks: Mapping[str, nn.Module]) -> Shards:
    """Cuts the model's parameters along their first dim over `mesh`, in place.

    The mesh's last axis shards; one before it replicates. Every rank must call it, with the same weights in place.
    Gradients become sums over all ranks of the mesh. Blocks that share a parameter with anything else are left to the
    last group, that of the rest.
    """
    uncut = {each for each in model.parameters() if stays_whole(each)}
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # rows are cut, whatever the strides were
    for block in _independent(model, blocks):
        _cut(block, mesh, uncut, gives_back=stage == 3)
    # The rest, such as embedding and head, is needed again as soon as the forward ends.
    _cut(model, mesh, uncut, gives_back=False)
    return Shards(model, stage=stage)


def stays_whole(parameter: Tensor) -> bool:
    """Whether every rank keeps all of it: what has no dim to cut along, or is not of real floating-point numbers."""
    return parameter.ndim == 0 or not parameter.is_floating_point()


def own_part(device: torch.device, name: str, value: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole value, on the device and of the type of the model's `tensor`, which has none yet."""
    value = value.to(tensor.dtype)
    if not isinstance(tensor, DTensor):
        return value.to(device)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return DTensor.from_local(
        value[box].clone(memory_format=torch.contiguous_format).to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _cut(module: nn.Module, mesh: Mesh, uncut: set[nn.Parameter], *, gives_back: bool) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=gives_back, ignored_params=uncut & set(module.parameters()))
    assert isinstance(module, FSDPModule)
    # A sum, not a mean: the loss was divided by the weight of the whole batch. These hold for this group alone.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # Samples may lead through different parameters on different ranks.
    module.set_reduce_scatter_unused_params(True, recurse=False)


def _independent(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Blocks with parameters of their own, none of which is used elsewhere in the model."""
    users: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        users.setdefault(parameter, set()).add(owner)
    shared = {owner for owners in users.values() if len(owners) > 1 for owner in owners}
    return [each for name, each in blocks.items() if name not in shared and any(True for _ in each.parameters())]
