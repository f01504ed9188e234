"""Tensor parallelism is no fake: the collectives of a block are counted, and one that nobody declared is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from parity_engine import start
from tensor_jobs import HEADS, TensorCase, build_job
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import trimaran as tm
from pool import Pool
from trimaran.errors import LayoutError

NUM_BLOCKS = 2  # of TinyGPT
SUM, SCATTER, GATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"


class Collectives(TorchDispatchMode):
    """Counts those of DTensor, and the sizes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        space, _, name = str(func).partition(".")
        if space == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.counts[name.partition(".")[0]] += 1
            self.largest = max(self.largest, result.numel())
        return result


def collectives_of(case: TensorCase) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Of one micro-batch's forward through the model, and of the loss and backward; the largest; and its tokens."""
    engine, loader, _ = start(build_job(case), layout=case.layout, micro_batch=case.micro_batch)
    batch = next(iter(loader))
    engine.step(batch)  # the first forward looks for collectives itself
    engine.drop_gradients()
    tensors = engine.to_device(batch.micro_batches[0])
    engine.backward(engine.loss.total(engine.forward(tensors), tensors))  # counted is a micro-batch after the first
    with Collectives() as forward:
        output = engine.forward(tensors)
    with Collectives() as backward:
        engine.backward(engine.loss.total(output, tensors))
    largest = max(forward.largest, backward.largest)
    return dict(forward.counts), dict(backward.counts), largest, tensors["input_ids"].numel()


@pytest.mark.parametrize("attend", ["separate", "manual", "chunk", "view", "grouped", "heads_first"])
@pytest.mark.parametrize("tp", [2])
def test_two_sums_for_each_block(pool: Pool, tp: int, attend: str) -> None:
    case = TensorCase(f"tp={tp}", attend=attend, vocabulary=64)  # type: ignore[arg-type]
    for forward, backward, largest, tokens in pool.run(collectives_of, tp, case):
        assert forward == {SUM: 1 + 2 * NUM_BLOCKS}  # the embedding's, then attention's and MLP's
        assert backward == {SUM: 1 + 2 * NUM_BLOCKS}  # before each colwise layer, and before the head
        assert largest == tokens * 12  # activations; logits would be five times as many


@pytest.mark.parametrize("attend", ["separate", "chunk"])
def test_their_halves_with_sp(pool: Pool, attend: str) -> None:
    case = TensorCase("tp=2 sp=true", attend=attend)  # type: ignore[arg-type]
    for forward, backward, _, _ in pool.run(collectives_of, 2, case):
        assert forward == {SCATTER: 1 + 2 * NUM_BLOCKS, GATHER: 2 * NUM_BLOCKS + 1}
        assert backward == {GATHER: 1 + 2 * NUM_BLOCKS, SCATTER: 2 * NUM_BLOCKS + 1}


def refusal(case: TensorCase, plan: dict[str, Any]) -> str:
    engine, loader, _ = start(replace(build_job(case), tp_plan=plan), layout=case.layout)
    try:
        engine.accumulate(next(iter(loader)))
    except LayoutError as error:
        return str(error)
    return ""


MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true"])
def test_a_fused_projection_declared_as_one_is_refused(pool: Pool, layout: str) -> None:
    plan = {**MLP, "blocks.*.attention.qkv": tm.colwise(heads=HEADS), "blocks.*.attention.out": "rowwise"}
    for said in pool.run(refusal, 2, TensorCase(layout, attend="chunk"), plan):
        assert said.startswith("chunk in blocks.0.attention gathers a tensor from all tensor ranks")


@pytest.mark.parametrize(
    ("attend", "expected"),
    [
        ("manual", "matmul in blocks.0.attention gathers a tensor from all tensor ranks"),
        (
            "separate",
            "attention of queries, keys and values that lie on the tensor ranks as: cut along dim 1, whole, cut",
        ),
    ],
)
def test_keys_that_are_not_declared_are_refused(pool: Pool, attend: str, expected: str) -> None:
    plan = {**MLP, "blocks.*.attention.value": "colwise", "blocks.*.attention.query": "colwise"}
    plan |= {"blocks.*.attention.out": "rowwise"}
    for said in pool.run(refusal, 2, TensorCase("tp=2", attend=attend), plan):  # type: ignore[arg-type]
        assert expected in said


def test_parts_that_are_not_those_declared_are_refused(pool: Pool) -> None:
    plan = {**MLP, "blocks.*.attention.qkv": tm.colwise(heads=HEADS, parts=2), "blocks.*.attention.out": "rowwise"}
    for said in pool.run(refusal, 2, TensorCase("tp=2", attend="chunk"), plan):
        assert said.startswith(
            "a fused projection that was declared as parts of 18, 18 outputs is split into 12, 12, 12"
        )
