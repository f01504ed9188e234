"""Functions of torch that DTensor does not do on cut tensors, or does by gathering them: done on each rank's own part.

Shapes: N rows, V entries of the vocabulary, B samples, H heads, T positions, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode

from trimaran.errors import LayoutError
from trimaran.world.groups import Mesh

_SPLITS = frozenset({torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.tensor_split, Tensor.tensor_split})
_HARMLESS = frozenset({"__get__", "size", "dim", "stride", "numel", "is_floating_point", "register_hook", "__repr__"})
_PARTS = "_trimaran_parts"


class PartwiseFunctions(TorchFunctionMode):
    """Inside, splits of a fused projection, attention and cross-entropy work on each rank's part, without a collective.

    Cross-entropy takes two small ones. `current` names the function at work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before, self.current = self.current, getattr(func, "__name__", str(func))
        try:
            if func is torch.cat and args:
                args = (_without_empty(args[0]), *args[1:])
            if args and isinstance(args[0], DTensor):
                if func is F.scaled_dot_product_attention:
                    return _attend(*args, **kwargs)
                if func is F.cross_entropy and _is_cut(args[0], min(1, args[0].ndim - 1)):
                    return _cross_entropy(*args, **kwargs)
                if hasattr(args[0], _PARTS):
                    return _of_parts(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self.current = before


def _without_empty(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """torch.cat passes over tensors [0], with which caches of keys and values begin; DTensor's does not."""
    if not any(isinstance(each, DTensor) for each in tensors):
        return tensors
    return [each for each in tensors if isinstance(each, DTensor) or tuple(each.shape) != (0,)]


def look_up(embedding: nn.Embedding, ids: Tensor, mesh: Mesh, placement: Placement) -> Tensor:
    """Rows of an embedding that is cut along the vocabulary: each rank looks up its own, and they are summed.

    DTensor's own gives every rank a gradient of the whole table.
    """
    assert isinstance(embedding.weight, DTensor)
    local = embedding.weight.to_local()
    start = first_row(embedding.num_embeddings, mesh)
    ids = ids.full_tensor() if isinstance(ids, DTensor) else ids
    is_here = (ids >= start) & (ids < start + local.shape[0])
    padding = embedding.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < start + local.shape[0] else None
    found = F.embedding(torch.where(is_here, ids - start, 0), local, padding)
    found = found.masked_fill(~is_here[..., None], 0)
    return DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(placements=[placement])


def first_row(size: int, mesh: Mesh) -> int:
    """Where this rank's rows of `size` begin, as `Shard` deals them: each rank but the last has as many."""
    return min(size, -(-size // mesh.size()) * mesh.get_local_rank())


def present_parts(y: DTensor, sizes: tuple[int, ...]) -> Tensor:
    """The output of a fused projection, whose last dim lies on the ranks part by part, as what the model takes it for.

    `chunk` and `split` then give cut tensors. Where the parts are equal, views of them do as well.
    """
    local, dim, mesh = y.to_local(), y.ndim - 1, y.device_mesh
    placement = _StridedShard(dim, split_factor=len(sizes)) if len(set(sizes)) == 1 else Shard(dim)
    shown = DTensor.from_local(local, mesh, [placement], run_check=False)
    setattr(shown, _PARTS, (sizes, local))
    return shown


def _of_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    fused, asked = args[0], args[1:]
    sizes, local = getattr(fused, _PARTS)
    if func in _SPLITS:
        dim = kwargs.get("dim", asked[1] if len(asked) > 1 else 0)
        if dim in (-1, fused.ndim - 1):
            mesh = fused.device_mesh
            _check_split(func, sizes, asked[0] if asked else next(v for k, v in kwargs.items() if k != "dim"))
            pieces = local.split([size // mesh.size() for size in sizes], -1)
            return tuple(DTensor.from_local(each, mesh, [Shard(fused.ndim - 1)], run_check=False) for each in pieces)
    elif len(set(sizes)) > 1 and getattr(func, "__name__", "") not in _HARMLESS:
        # In this order of rows DTensor would compute something else.
        raise LayoutError(
            f"{getattr(func, '__name__', func)} of a fused projection whose parts have {_join(sizes)} outputs.",
            "With tensor parallelism each rank has a slice of each part.",
            f"Take the parts out by split([{_join(sizes)}], dim=-1).",
        )
    return func(*args, **kwargs)


def _check_split(func: Callable[..., Any], sizes: tuple[int, ...], asked: int | Sequence[int]) -> None:
    total = sum(sizes)
    if isinstance(asked, int):
        size = -(-total // asked) if "chunk" in func.__name__ or "tensor_split" in func.__name__ else asked
        wanted = tuple(min(size, total - at) for at in range(0, total, size))
    elif "tensor_split" in func.__name__:
        wanted = tuple(b - a for a, b in zip((0, *asked), (*asked, total), strict=True))
    else:
        wanted = tuple(asked)
    if wanted != sizes:
        raise LayoutError(
            f"a fused projection that was declared as parts of {_join(sizes)} outputs is split into {_join(wanted)}.",
            "Each tensor rank holds a slice of each declared part.",
            "Correct parts=, heads= or kv_heads= in the tp_plan.",
        )


def _join(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _is_cut(tensor: object, dim: int) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements[0].is_shard(dim)


def _attend(query: Any, key: Any, value: Any, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Attention [B, H, T, D] of this rank's heads."""
    mesh, placement, num_heads = query.device_mesh, query.placements[0], query.shape[1]
    placements = [each.placements[0] if isinstance(each, DTensor) else Replicate() for each in (query, key, value)]
    is_cut = query.ndim == 4 and placement.is_shard(1)
    if any(each != placement for each in placements) or not (is_cut or placement.is_replicate()):
        told = (f"cut along dim {each.dim}" if isinstance(each, Shard) else "whole" for each in placements)
        raise LayoutError(
            f"attention of queries, keys and values that lie on the tensor ranks as: {', '.join(told)}.",
            "Each rank computes whole heads, of all three alike: [samples, heads, positions, width], cut along dim 1.",
            "Declare the layers of all three as colwise, or none.",
        )
    local = [each.to_local() if isinstance(each, DTensor) else each for each in (query, key, value)]
    if attn_mask is not None:
        attn_mask = attn_mask.full_tensor() if isinstance(attn_mask, DTensor) else attn_mask
        head_dim = attn_mask.ndim - 3
        if is_cut and head_dim >= 0 and attn_mask.shape[head_dim] == num_heads > 1:
            count = local[0].shape[1]
            attn_mask = attn_mask.narrow(head_dim, mesh.get_local_rank() * count, count)
    mixed = F.scaled_dot_product_attention(local[0], local[1], local[2], attn_mask, *args, **kwargs)
    return DTensor.from_local(mixed, mesh, [placement], run_check=False)


def _cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As torch's, of logits [N, V] that are cut along the vocabulary; what else it can do, on gathered logits."""
    mesh = input.device_mesh
    if weight is not None or input.ndim != 2 or target.is_floating_point() or size_average is not None or reduce:
        whole = input.redistribute(placements=[Replicate()]).to_local()
        return F.cross_entropy(
            whole, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing=label_smoothing
        )
    target = target.full_tensor() if isinstance(target, DTensor) else target
    size = input.shape[1]
    is_counted = target != ignore_index
    if target.device.type == "cpu" and torch.any(is_counted & ((target < 0) | (target >= size))):
        raise IndexError("Target is out of bounds.")  # as torch does
    losses: Tensor = _CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
        input.to_local(), target, is_counted, first_row(size, mesh), size, label_smoothing, mesh.get_group()
    )
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()


class _CutCrossEntropy(torch.autograd.Function):
    """Losses [N] of logits [N, V / tp]: one all-reduce for the largest logit, one for what is summed over V."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        is_counted: Tensor,
        start: int,
        size: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        is_here = is_counted & (target >= start) & (target < start + logits.shape[1])
        index = torch.where(is_here, target - start, 0)[:, None]
        at_target = torch.where(is_here, shifted.gather(1, index)[:, 0], 0.0)
        rows = [at_target] + ([shifted.sum(-1)] if smoothing else [])
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), *rows])
        dist.all_reduce(sums, group=group)
        losses = sums[0].log() - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing / size * sums[2]
        ctx.save_for_backward(exponentials, sums[0], index, is_here, is_counted)
        ctx.smoothing, ctx.size = smoothing, size
        return torch.where(is_counted, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, index, is_here, is_counted = ctx.saved_tensors
        found = exponentials / total[:, None]
        hit = is_here.to(found.dtype) * (1 - ctx.smoothing)
        found.scatter_add_(1, index, -hit[:, None])
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.size
        found *= torch.where(is_counted, gradients[0], 0.0)[:, None]
        return found, None, None, None, None, None, None
