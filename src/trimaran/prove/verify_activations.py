"""What each module put out in the first step, in few numbers per sample, so that any two cuts can be compared.

An output [samples, width, ...] is kept as the sum and the sum of squares over what follows the width, for each sample
at its position in the run.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trimaran.batch import MicroBatch, RankBatch
from trimaran.world.groups import World

INPUT = "input "
"""Begins the names of what the model was given, as against what its modules put out."""


@dataclass(frozen=True)
class Activation:
    """One output of one call for the samples from position `start` on: `values` [samples, width, 2], float64.

    `rest`: how many numbers each sum goes over.
    """

    name: str
    start: int
    rest: int
    values: Tensor


class Recorder:
    """Records all modules' outputs, and the order in which modules are called, in the forwards of one global batch."""

    def __init__(self, model: nn.Module, batch: RankBatch, inputs: Sequence[str]) -> None:
        self._model = model
        self._micro_batches = iter(batch.micro_batches)
        self._inputs = inputs
        self._current: MicroBatch | None = None
        self._calls: Counter[str] = Counter()
        self._before: object = None
        self.activations: list[Activation] = []
        self.calls: dict[str, int] = {}
        """Module name -> when it was first called, counted from 0."""
        self.rowless: dict[str, None] = {}
        """Modules some output of which has no row for each sample."""
        self.draws_numbers = False
        """Whether a forward drew from a default generator."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what runs inside; a forward that a backward repeats (recompute) is no forward of its own."""
        handles = [self._model.register_forward_pre_hook(self._begin)]
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._note_call, name)))
            handles.append(module.register_forward_hook(partial(self._note_output, name)))
        handles.append(self._model.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: object) -> None:
        self._current = next(self._micro_batches, None)
        self._calls.clear()
        self._before = _generators(self._model)
        if self._current is not None and not self._current.weightless:
            for key in self._inputs:
                self._keep(f"{INPUT}{key}", self._current, self._current.tensors[key])

    def _end(self, *_: object) -> None:
        self._current = None
        self.draws_numbers |= _generators(self._model) != self._before

    def _note_call(self, name: str, *_: object) -> None:
        if self._current is not None:
            self.calls.setdefault(name, len(self.calls))

    def _note_output(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        micro_batch = self._current
        if micro_batch is None or micro_batch.weightless:
            return
        self._calls[name] += 1
        call = f", call {self._calls[name]}" if self._calls[name] > 1 else ""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for index, leaf in enumerate(leaves):
            part = f", part {index + 1}" if len(leaves) > 1 else ""
            self._keep(f"{name or type(module).__name__}{call}{part}", micro_batch, leaf)

    @torch.no_grad()
    def _keep(self, name: str, micro_batch: MicroBatch, tensor: Tensor) -> None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not whole.dim() or whole.shape[0] != micro_batch.num_samples or not whole.numel():
            self.rowless[name] = None
            return
        if whole.is_complex():
            whole = torch.view_as_real(whole)
        if whole.device.type == "mps":
            whole = whole.cpu()  # which has float64
        rows = whole.reshape(*whole.shape[:1], whole.shape[1] if whole.dim() > 1 else 1, -1).double()
        values = torch.stack([rows.sum(-1), rows.square().sum(-1)], -1).cpu()
        self.activations.append(Activation(name, micro_batch.position, rows.shape[-1], values))


def gather_activations(mine: Sequence[Activation], world: World) -> list[Activation]:
    """Those of all ranks, rank by rank, on every rank; of tensor ranks, which see the same, the first one's.

    Every rank must call it.
    """
    if world.place.tp:
        mine = ()
    described = [(each.name, each.start, each.rest, tuple(each.values.shape)) for each in mine]
    of_ranks = [json.loads(text) for text in world.gather_text(json.dumps(described))]
    lists = [[Activation(name, at, rest, torch.zeros(shape)) for name, at, rest, shape in each] for each in of_ranks]
    sizes = [sum(each.values.numel() for each in activations) for activations in lists]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    if mine:
        flat.split(sizes)[world.rank].copy_(torch.cat([each.values.flatten() for each in mine]))
    world.agree(flat)
    everyones = [each for activations in lists for each in activations]
    parts = flat.split([each.values.numel() for each in everyones])
    return [replace(each, values=part.view(each.values.shape)) for each, part in zip(everyones, parts, strict=True)]


def _generators(model: nn.Module) -> tuple[Any, ...]:
    """Where the generators stand that a forward may draw from."""
    device = next(model.parameters()).device
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    _, keys, position, *rest = np.random.get_state(legacy=True)
    return (*(bytes(state.numpy()) for state in states), random.getstate(), np.asarray(keys).tobytes(), position, *rest)
