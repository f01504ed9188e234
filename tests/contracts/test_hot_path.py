"""However many micro-batches a step has, the host reads no more values from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimaran.batch import MicroBatch, RankBatch
from trimaran.engine import build_engine
from trimaran.job import Job, ScaledRate
from trimaran.layout import Layout, Precision
from trimaran.world.groups import open_world

READ = torch.ops.aten._local_scalar_dense.default  # what .item(), float(), bool() and int() of a tensor end in


class CountReads(TorchDispatchMode):
    """Counts the values that travel from tensors to the host."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is READ
        return func(*args, **(kwargs or {}))


def count_reads(work: Callable[[], object]) -> int:
    """How many values `work` reads from tensors."""
    with CountReads() as counter:
        work()
    return counter.num_reads


@dataclass(frozen=True)
class SquaredError:
    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["target"])))

    def total(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (output - batch["target"]).square().sum()


@dataclass(frozen=True)
class PlainSGD:
    def rate(self, global_batch: int) -> ScaledRate:
        return ScaledRate(0.1, "0.1")

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
        group = {"params": [parameter for _, parameter in named_parameters], "base_lr": lr}
        return torch.optim.SGD([group], lr=lr)

    def describe(self) -> str:
        return "sgd"


def reads_of_a_step(*, precision: Precision, num_micro_batches: int) -> int:
    """Values read in the second of two optimizer steps of two samples per micro-batch."""
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        data=[{}],
        inputs={"input": "x"},
        loss=SquaredError(),
        optimizer=PlainSGD(),
        global_batch=2 * num_micro_batches,
        steps=2,
        clip=1.0,
    )
    layout = Layout(micro_batch=2, precision=precision).resolve(world_size=1, global_batch=job.global_batch)
    engine = build_engine(job, layout, open_world(None, layout, device="cpu"))
    tensors = {"x": torch.randn(2, 3), "target": torch.randn(2, 1)}
    micro_batches = tuple(MicroBatch(tensors, position=2 * at, num_samples=2) for at in range(num_micro_batches))
    size = job.global_batch
    first, second = (RankBatch(index, size, micro_batches, total_weight=float(size)) for index in range(2))
    engine.step(first)
    return count_reads(lambda: engine.step(second))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_reads_do_not_grow_with_micro_batches(precision: Precision) -> None:
    few, many = (reads_of_a_step(precision=precision, num_micro_batches=number) for number in (1, 4))
    assert few == many


def test_every_way_of_reading_is_counted() -> None:
    value = torch.ones(())
    assert count_reads(lambda: [value.item(), float(value), bool(value), int(value)]) == 4
    assert count_reads(lambda: value + value) == 0
