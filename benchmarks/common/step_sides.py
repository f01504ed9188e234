"""The two sides of a step's comparison, and what they train: engine.step, and the loop a careful person writes.

Shapes: B samples, T bytes, D width.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import trimaran as tm
from trimaran.batch import MicroBatch, RankBatch
from trimaran.engine import StepResult, build_engine
from trimaran.layout import ResolvedLayout
from trimaran.world.groups import World, join_default_group, open_world

NUM_BATCHES = 8
LR, WEIGHT_DECAY, CLIP, SEED = 3e-4, 0.1, 1.0, 0
ENGINE, PLAIN, DDP, DDP_VIEWS, FSDP = "engine", "plain loop", "DDP", "DDP, bucket views", "FSDP2"

Batch = Mapping[str, Tensor]


class GPT(nn.Module):
    """3.2 M parameters over bytes: compute outweighs the update."""

    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(block, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTD = self.embed(input_ids) + self.place.weight
        return self.head(self.blocks(x_BTD, mask=self.mask, is_causal=True))


def wide_mlp() -> nn.Module:
    """25 M parameters and 8 samples: the update and the sum over ranks outweigh the compute."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024))


@dataclass(frozen=True)
class Workload:
    """A model, its data, and its loss twice: as the engine takes it, and as a mean written by hand."""

    model: Callable[[], nn.Module]
    input_key: str
    input_name: str
    global_batch: int
    make_batch: Callable[[torch.Generator, int], dict[str, Tensor]]
    loss: Any
    mean_loss: Callable[[Tensor, Batch], Tensor]


def _token_batch(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(256, (num_samples, 64), generator=generator)}


def _token_loss(logits: Tensor, batch: Batch) -> Tensor:
    labels = F.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _vector_batch(generator: torch.Generator, num_samples: int) -> dict[str, Tensor]:
    return {name: torch.randn(num_samples, 1024, generator=generator) for name in ("x", "target")}


def _vector_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output.float(), batch["target"])


WORKLOADS = {
    "gpt": Workload(GPT, "input_ids", "input_ids", 16, _token_batch, tm.losses.next_token(), _token_loss),
    "mlp": Workload(wide_mlp, "x", "input", 8, _vector_batch, tm.losses.mse(), _vector_loss),
}


@dataclass(frozen=True)
class Cell:
    """One comparison: a workload at a precision, cut into micro-batches, on one or several processes."""

    workload: str
    precision: str
    num_procs: int
    num_threads: int
    accumulation: int
    zero: int = 0

    def __str__(self) -> str:
        stage = f" zero{self.zero}" if self.zero else ""
        return f"{self.workload} {self.precision} {self.num_procs}x{self.num_threads} acc{self.accumulation}{stage}"

    @property
    def rivals(self) -> list[str]:
        if self.zero:
            return [FSDP]
        return [PLAIN] if self.num_procs == 1 else [DDP, DDP_VIEWS]


class Side(Protocol):
    """`step` trains on one global batch and returns (loss, gradient norm) of the step before, None at the first."""

    def step(self, index: int) -> tuple[float, float] | None: ...


class EngineSide:
    """engine.step, fed as the run feeds it: the next batch's weight is summed over the ranks under this step."""

    def __init__(self, cell: Cell, world: World, layout: ResolvedLayout, batches: Sequence[RankBatch]) -> None:
        workload = WORKLOADS[cell.workload]
        job = tm.Job(
            model=lambda: workload.model(),
            data=range(workload.global_batch),
            loss=workload.loss,
            optimizer=tm.optim.adamw(lr=LR, weight_decay=WEIGHT_DECAY),
            global_batch=workload.global_batch,
            inputs={workload.input_name: workload.input_key},
            steps=1_000_000,
            clip=CLIP,
            seed=SEED,
        )
        self._engine = build_engine(job, layout, world)
        self._world = world
        self._batches = batches
        self._ask(0)
        self._last: StepResult | None = None

    def step(self, index: int) -> tuple[float, float] | None:
        if self._work is not None:
            self._work.wait()
        weight = float(self._weight)
        self._ask(index + 1)
        result = self._engine.step(replace(self._batches[index % NUM_BATCHES], index=index, total_weight=weight))
        last, self._last = self._last, result
        return None if last is None else (last.loss, last.grad_norm)

    def _ask(self, index: int) -> None:
        self._weight = self._engine.local_weight(self._batches[index % NUM_BATCHES])
        self._work = self._world.agree_later(self._weight)


class HandWrittenSide:
    """What a careful person writes for equal micro-batches of full weight: means, autocast, no_sync, fused AdamW."""

    def __init__(self, cell: Cell, name: str, batches: Sequence[RankBatch]) -> None:
        self._workload = WORKLOADS[cell.workload]
        self._accumulation = cell.accumulation
        self._num_procs = cell.num_procs
        self._autocast = cell.precision == "bf16"
        self._batches = batches
        torch.manual_seed(SEED)
        self._model = model = self._workload.model()
        self._ddp: DistributedDataParallel | None = None
        self._zero = cell.zero
        if cell.zero:
            self._model = shard_by_hand(model, cell)
        elif cell.num_procs > 1:
            self._model = self._ddp = DistributedDataParallel(
                model, forward_sync_buffers=False, gradient_as_bucket_view=name == DDP_VIEWS
            )
        self._parameters = list(model.parameters())
        groups = [
            {"params": [each for each in self._parameters if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [each for each in self._parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
        self._last: tuple[Tensor, Tensor, dist.Work | None] | None = None

    def step(self, index: int) -> tuple[float, float] | None:
        self._optimizer.zero_grad(set_to_none=True)
        micro_batches = self._batches[index % NUM_BATCHES].micro_batches
        loss_sum = torch.zeros(())
        for position, micro_batch in enumerate(micro_batches):
            last = position == len(micro_batches) - 1
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(last or self._zero > 1)
                self._model.set_reshard_after_backward(last or self._zero == 3)
            with self._ddp.no_sync() if self._ddp is not None and not last else nullcontext():
                loss_sum += self._run(micro_batch.tensors)
        work = None
        if self._num_procs > 1:
            work = dist.all_reduce(loss_sum, async_op=True)
        norm = nn.utils.clip_grad_norm_(self._parameters, CLIP, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._optimizer.step()
        return self._report(loss_sum, norm, work)

    def _run(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext():
            output = self._model(batch[self._workload.input_key])
        loss = self._workload.mean_loss(output, batch) / self._accumulation
        loss.backward()
        return loss.detach()

    def _report(self, loss_sum: Tensor, norm: Tensor, work: dist.Work | None) -> tuple[float, float] | None:
        last, self._last = self._last, (loss_sum, norm, work)
        if last is None:
            return None
        loss, norm, work = last
        if work is not None:
            work.wait()
        return loss.item() / self._num_procs, norm.item()


def shard_by_hand(model: nn.Module, cell: Cell) -> nn.Module:
    """As torch's tutorial has it: each layer, then the rest."""
    mesh = init_device_mesh("cpu", (cell.num_procs,))
    blocks = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=cell.zero == 3)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def build_sides(cell: Cell, rank: int, store: str, names: Sequence[str]) -> dict[str, Side]:
    """The named sides, ready to step, in one of the processes of a cell. Every rank must call it."""
    torch.set_num_threads(cell.num_threads)
    layout = tm.Layout(precision=cell.precision, zero=cell.zero).resolve(  # type: ignore[arg-type]
        world_size=cell.num_procs, global_batch=WORKLOADS[cell.workload].global_batch
    )
    world = _open_world(cell, rank, store, layout)
    batches = _build_batches(cell, rank)
    return {
        name: EngineSide(cell, world, layout, batches) if name == ENGINE else HandWrittenSide(cell, name, batches)
        for name in names
    }


def _open_world(cell: Cell, rank: int, store: str, layout: ResolvedLayout) -> World:
    if cell.num_procs == 1:
        return open_world(None, layout, device="cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, cell.num_procs),
        rank=rank,
        world_size=cell.num_procs,
        timeout=timedelta(seconds=300),
    )
    return join_default_group(layout, torch.device("cpu"))


def _build_batches(cell: Cell, rank: int) -> list[RankBatch]:
    """This rank's share of each global batch, cut beforehand."""
    workload = WORKLOADS[cell.workload]
    generator = torch.Generator().manual_seed(SEED)
    size = workload.global_batch // (cell.num_procs * cell.accumulation)
    batches = []
    for index in range(NUM_BATCHES):
        whole = workload.make_batch(generator, workload.global_batch)
        starts = [(rank * cell.accumulation + each) * size for each in range(cell.accumulation)]
        cut = [{key: each[start : start + size].clone() for key, each in whole.items()} for start in starts]
        pieces = [MicroBatch(tensors, start, size) for tensors, start in zip(cut, starts, strict=True)]
        batches.append(RankBatch(index, workload.global_batch, tuple(pieces)))
    return batches
