"""Tensor and sequence parallelism: a model's layers cut over the tensor ranks as the job's plan declares.

Every parameter becomes a DTensor over the axis tp, and torch's DTensor does the arithmetic; the model's code stays what
it is. Of a block, two layers meet: a colwise one, whose outputs are dealt to the ranks, and a rowwise one after it,
whose outputs are summed (Shoeybi et al. 2019, arXiv 1909.08053, section 3). With sp the activations between the blocks
are cut along the sequence: the sum becomes a reduce-scatter, and a gather stands before the colwise layer (Korthikanti
et al. 2022, arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from trimaran.engine.local import with_local
from trimaran.engine.precision import map_tensors
from trimaran.engine.tensor_match import match_plan, part_sizes
from trimaran.engine.tensor_ops import PartwiseFunctions, look_up, present_parts
from trimaran.engine.tensor_watch import Watch
from trimaran.job import Loss
from trimaran.tensor_plan import Colwise, DealtRows, Declaration, Rowwise, Vocab
from trimaran.world.groups import Mesh

if TYPE_CHECKING:
    from trimaran.job import Batch

_WHOLE = Replicate()


class TensorParallel:
    """A model whose layers are cut over `mesh`, the axis tp; `apply_tensor` makes it.

    Called with gradients enabled the model gives cut outputs, which a wrapped loss understands; under no_grad it
    gives whole, plain tensors, so that metrics and samples see what they know.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, sp: bool) -> None:
        self.mesh = mesh
        self.sp = sp
        self.dealt: dict[str, DealtRows] = {}
        """Name of a parameter -> the order of its rows, where that is not the model's."""
        self._model = model
        self._functions = PartwiseFunctions()
        self._watch: Watch | None = Watch(self._functions)
        self._is_active = False
        self._entered: tuple[Tensor, Tensor, tuple[int, bool, int]] | None = None

    @property
    def between(self) -> Placement:
        """How activations [samples, positions, ...] lie between the blocks."""
        return Shard(1) if self.sp else _WHOLE

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, plain tensors count as replicated, and cut ones are computed on part by part.

        A backward belongs inside as its forward does: torch takes both settings along to the threads that run it.
        """
        if self._is_active:
            yield
            return
        dispatcher = DTensor._op_dispatcher
        before, dispatcher._allow_implicit_replication = dispatcher._allow_implicit_replication, True
        self._is_active = True
        try:
            with self._functions:
                yield
        finally:
            self._is_active = False
            self._entered = None
            dispatcher._allow_implicit_replication = before

    def wrap_loss(self, loss: Loss) -> Loss:
        """The loss, computed on cut logits where it says that it can; its total is a plain scalar.

        It says so by an attribute `takes_cut_logits`; what it needs is `F.cross_entropy` of logits [N, V]. For other
        losses, which may do what torch's DTensor does wrongly on a slice (gather), the output is gathered.
        """
        return _CutLoss(loss, self)

    def enter(self, x: Tensor) -> Tensor:
        """An activation whole on every rank, for a layer that is cut; its gradient is summed over the ranks there.

        Layers that read the same activation, such as queries, keys and values, share one gather, and one sum.
        """
        # Not one that was changed in place since, nor one of a forward before recompute runs it again.
        moment = (x._version, torch.is_grad_enabled(), torch._C._current_graph_task_id())
        if self._entered is not None and self._entered[0] is x and self._entered[2] == moment:
            return self._entered[1]
        with self.declared():
            whole = as_dtensor(x, self.mesh).redistribute(placements=[_WHOLE])
        self._entered = (x, whole, moment)
        return whole

    def declared(self) -> AbstractContextManager[None]:
        """What is inside is a collective that the plan asks for."""
        return nullcontext() if self._watch is None else self._watch.declared()

    def reduce_partial(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sums, in one all-reduce, those gradients of which each tensor rank has its own samples' or heads' share.

        These are of parameters that every rank holds whole. Every rank must call it, after all backwards of a step.
        """
        pending = [
            each for each in parameters if isinstance(each.grad, DTensor) and each.grad.placements[-1].is_partial()
        ]
        if not pending:
            return
        for kind in dict.fromkeys(each.dtype for each in pending):
            alike = [each for each in pending if each.dtype == kind]
            local = [each.grad._local_tensor for each in alike]  # type: ignore[union-attr]
            flat = torch.cat([each.flatten() for each in local])
            dist.all_reduce(flat, group=self.mesh.get_group())
            for parameter, numbers, total in zip(alike, local, flat.split([x.numel() for x in local]), strict=True):
                numbers.copy_(total.view(numbers.shape))
                parameter.grad = with_local(parameter, numbers)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The whole model's."""
        if not torch.is_grad_enabled():
            with self.active():
                return map_tensors(forward(*args, **kwargs), _gather)
        with self.active():
            if self._watch is None:
                return forward(*args, **kwargs)
            with self._watch.watching(self._model):
                output = forward(*args, **kwargs)
            self._watch = None  # once is enough: every forward takes the same way
            return output

    def _block_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's, which recompute runs in the backward, where torch keeps no function mode."""
        is_there = self._functions in torch.overrides._get_current_function_mode_stack()
        with nullcontext() if is_there else self._functions:
            return forward(*args, **kwargs)


class _CutLoss:
    def __init__(self, loss: Loss, tensor: TensorParallel) -> None:
        self._loss = loss
        self._tensor = tensor

    def weight(self, batch: Batch, /) -> Tensor:
        return self._loss.weight(batch)

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        with self._tensor.active():
            if not getattr(self._loss, "takes_cut_logits", False):
                output = map_tensors(output, _gather)
            total = self._loss.total(output, batch)
            return total.full_tensor() if isinstance(total, DTensor) else total

    def __repr__(self) -> str:
        return repr(self._loss)


def apply_tensor(
    model: nn.Module,
    plan: Mapping[str, object] | None,
    mesh: Mesh,
    *,
    sp: bool,
    blocks: Mapping[str, nn.Module],
) -> TensorParallel:
    """Cuts the model's parameters over `mesh` and its layers as `plan` declares, in place; no collective.

    `blocks` are what recompute may run again. Every rank must call it with the same weights in place. Raises
    LayoutError or JobError where the plan does not fit.
    """
    tensor = TensorParallel(model, mesh, sp=sp)
    declared = match_plan(model, plan, mesh.size())
    dims = _cut_dims(model, declared, tensor)
    _cut_parameters(model, dims, tensor)
    for name, module in model.named_modules():
        forward = _forward_of(module, declared.get(name), tensor)
        if forward is not None:
            module.forward = forward
    for block in blocks.values():
        block.forward = partial(tensor._block_forward, block.forward)
    model.forward = partial(tensor._forward, model.forward)
    return tensor


def as_dtensor(x: Tensor, mesh: Mesh) -> DTensor:
    """A plain tensor as one that every rank holds whole."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [_WHOLE], run_check=False)


def _cut_dims(model: nn.Module, declared: Mapping[str, Declaration], tensor: TensorParallel) -> dict[Tensor, int]:
    """Parameter -> the dim along which it is cut; notes whose rows are dealt in another order."""
    dims: dict[Tensor, int] = {}
    for name, declaration in declared.items():
        module = model.get_submodule(name)
        if isinstance(declaration, Rowwise):
            assert isinstance(module, nn.Linear)
            dims[module.get_parameter("weight")] = 1
        elif isinstance(declaration, Colwise | Vocab):
            for key, parameter in module.named_parameters(recurse=False):
                dims[parameter] = 0
                if isinstance(declaration, Colwise) and declaration.parts > 1:
                    assert isinstance(module, nn.Linear)
                    tensor.dealt[f"{name}.{key}"] = DealtRows(part_sizes(module, declaration), tensor.mesh.size())
    return dims


def _cut_parameters(model: nn.Module, dims: Mapping[Tensor, int], tensor: TensorParallel) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay one
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                order = tensor.dealt.get(f"{prefix}.{key}")
                whole = parameter.data if order is None else deal(parameter.data, order)
                placement = Shard(dims[parameter]) if parameter in dims else _WHOLE
                cut = distribute_tensor(whole, tensor.mesh, [placement], src_data_rank=None)
                local = cut._local_tensor.clone(memory_format=torch.contiguous_format)  # not a view of the whole
                made[parameter] = nn.Parameter(with_local(cut, local), requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    made[parameter].register_post_accumulate_grad_hook(_fit_gradient)
            module._parameters[key] = made[parameter]


def _fit_gradient(parameter: Tensor) -> None:
    """A gradient lies as its parameter does, or is a sum that is still pending, which `reduce_partial` takes in."""
    gradient = parameter.grad
    assert isinstance(parameter, DTensor)
    if not isinstance(gradient, DTensor) or gradient.placements == parameter.placements:
        return
    if not (gradient.placements[0].is_partial() and parameter.placements[0].is_replicate()):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def deal(whole: Tensor, order: DealtRows) -> Tensor:
    """Rows of a whole tensor in the order in which they lie on the ranks."""
    return torch.cat([whole[start : start + count] for _, start, count in order.runs(0, whole.shape[0])])


def undeal(dealt: Tensor, order: DealtRows) -> Tensor:
    """Rows in the model's order again."""
    whole = torch.empty_like(dealt)
    for at, start, count in order.runs(0, dealt.shape[0]):
        whole[start : start + count] = dealt[at : at + count]
    return whole


def _forward_of(
    module: nn.Module, declaration: Declaration | None, tensor: TensorParallel
) -> Callable[..., Tensor] | None:
    """What replaces a module's forward; None where it stays."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        if isinstance(declaration, Rowwise):
            return partial(_rowwise, tensor, module)
        if isinstance(declaration, Colwise | Vocab):
            return partial(_colwise, tensor, module, declaration)
        return partial(_replicated_linear, tensor, module.forward) if tensor.sp else None
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        if isinstance(declaration, Vocab):
            return partial(_vocab_rows, tensor, module)
        return partial(_replicated_rows, tensor, module.forward) if tensor.sp else None
    return None


def _colwise(tensor: TensorParallel, linear: nn.Linear, declaration: Colwise | Vocab, x: Tensor) -> Tensor:
    y = nn.functional.linear(tensor.enter(x), linear.weight, linear.bias)
    assert isinstance(y, DTensor)
    if isinstance(declaration, Vocab):
        return y
    if declaration.gathers:
        with tensor.declared():
            return y.redistribute(placements=[_WHOLE])
    return y if declaration.parts == 1 else present_parts(y, part_sizes(linear, declaration))


def _rowwise(tensor: TensorParallel, linear: nn.Linear, x: Tensor) -> Tensor:
    x = as_dtensor(x, tensor.mesh).redistribute(placements=[Shard(x.ndim - 1)])
    y = nn.functional.linear(x, linear.weight)
    assert isinstance(y, DTensor)
    with tensor.declared():
        y = y.redistribute(placements=[tensor.between if y.ndim > 2 else _WHOLE])
    return y if linear.bias is None else y + linear.bias.to(y.dtype)  # once, not on each rank


def _vocab_rows(tensor: TensorParallel, embedding: nn.Embedding, ids: Tensor) -> Tensor:
    with tensor.declared():
        return look_up(embedding, ids, tensor.mesh, tensor.between if ids.ndim > 1 else _WHOLE)


def _replicated_rows(tensor: TensorParallel, forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """With sp each rank looks up its part of the sequences."""
    if ids.ndim < 2:
        return forward(ids)
    return forward(as_dtensor(ids, tensor.mesh).redistribute(placements=[tensor.between]))


def _replicated_linear(tensor: TensorParallel, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer that is not declared: every rank computes all of it, on whole sequences."""
    is_cut = isinstance(x, DTensor) and x.placements[0].is_shard(1) and x.ndim > 2
    return forward(tensor.enter(x) if is_cut else x)


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
