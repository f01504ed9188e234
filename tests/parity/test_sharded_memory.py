"""What ranks hold of a sharded model, between steps and in the middle of accumulation; and what they send."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from parity_engine import start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trimaran as tm
from pool import Pool

WIDTH, DEPTH = 64, 4
GROUP = 2 * WIDTH * 4 * WIDTH


class Tower(nn.Module):
    """Equal blocks, and an end that is a fraction of one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


NUM_PARAMETERS = DEPTH * GROUP + WIDTH


def job() -> tm.Job:
    generator = torch.Generator().manual_seed(0)
    data = [
        {"x": torch.randn(WIDTH, generator=generator), "target": torch.randn(1, generator=generator)} for _ in range(64)
    ]
    return tm.Job(
        model=Tower,
        data=data,
        inputs=("x",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.adamw(lr=1e-3),
        global_batch=16,
        steps=4,
    )


def living_bytes() -> int:
    """Of all tensors that this process can reach, each memory once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor) and type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            for tensor in (each, each.grad if each.is_leaf else None):  # a gradient need not have been seen by Python
                if tensor is not None and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def bytes_held(layout: str) -> tuple[float, float]:
    """Bytes per parameter in the middle of the second step's accumulation, and between steps; without gradients."""
    engine, loader, _ = start(job(), precision="fp32", micro_batch=2, layout=layout)
    first, second, *_ = list(loader)
    engine.step(first)
    engine.drop_gradients()
    between = living_bytes()
    middle: list[int] = []
    run = engine._run_micro_batch

    def watched(index: int, micro_batch: object, factor: float) -> Tensor:
        middle.append(living_bytes())
        return run(index, micro_batch, factor)  # type: ignore[arg-type]

    engine._run_micro_batch = watched  # type: ignore[method-assign, assignment]
    engine.accumulate(second)
    base = living_bytes_of_others(engine)
    return (middle[1] - base) / NUM_PARAMETERS, (between - base) / NUM_PARAMETERS


def living_bytes_of_others(engine: object) -> int:
    """What lives when the engine is gone: data, batches, the pool's own."""
    from trimaran.engine import Engine

    assert isinstance(engine, Engine)
    before = living_bytes()
    own = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in engine_tensors(engine)}
    return before - sum(own.values())


def engine_tensors(engine: object) -> list[Tensor]:
    from trimaran.engine import Engine
    from trimaran.engine.local import local_tensor

    assert isinstance(engine, Engine)
    held: list[Tensor] = [local_tensor(each) for each in engine.model.parameters()]
    held += [local_tensor(each.grad) for each in engine.model.parameters() if each.grad is not None]
    held += [value for state in engine.optimizer.state.values() for value in state.values()]
    return held


@pytest.mark.parametrize(
    ("dp", "layout", "middle"),
    [
        (2, "zero=1", 8 + 12 / 2),
        (2, "zero=2", 4 + 16 / 2),
        (2, "zero=3", 16 / 2),
        (4, "zero=1", 8 + 12 / 4),
        (4, "zero=2", 4 + 16 / 4),
        (4, "zero=3", 16 / 4),
        (4, "zero=3 shard=2", 16 / 2),
    ],
)
def test_bytes_per_parameter(pool: Pool, dp: int, layout: str, middle: float) -> None:
    group = 4 * GROUP / NUM_PARAMETERS
    num_sharing = 2 if "shard=2" in layout else dp
    for found, between in pool.run(bytes_held, dp, layout):
        assert middle * 0.95 <= found <= middle * 1.05 + group
        assert between == pytest.approx(12 / num_sharing, rel=0.05)


class Counted(TorchDispatchMode):
    """Counts collectives and the bytes of what they give or sum."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        namespace, name = func.name().split("::")
        if namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            self.counts[name.strip("_")] = self.counts.get(name.strip("_"), 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(layout: str, micro_batch: int) -> dict[str, int]:
    """Those of the second step, but for the loss and the norm."""
    engine, loader, _ = start(job(), precision="fp32", micro_batch=micro_batch, layout=layout)
    first, second, *_ = list(loader)
    engine.step(first)
    second = replace(second, total_weight=engine.agree_on_weight(second))
    with Counted() as counted:
        engine.step(second)
    return counted.counts


G = DEPTH + 1


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("layout", "gathers", "scatters"),
    [
        ("zero=1", lambda M: G, lambda M: G),
        ("zero=2", lambda M: G, lambda M: M * G),
        ("zero=3", lambda M: M * (2 * G - 1), lambda M: M * G),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_collectives_of_a_step(pool: Pool, layout: str, gathers, scatters, num_micro_batches: int) -> None:  # type: ignore[no-untyped-def]
    for counts in pool.run(collectives, 2, layout, 8 // num_micro_batches):
        assert sum(each for name, each in counts.items() if "allgather" in name) == gathers(num_micro_batches)
        assert sum(each for name, each in counts.items() if "reduce_scatter" in name) == scatters(num_micro_batches)
        assert sum(each for name, each in counts.items() if "allreduce" in name) == 2  # the norm, and the loss


def test_hybrid_shards_are_summed_between_groups_once_per_step(pool: Pool) -> None:
    for counts in pool.run(collectives, 4, "zero=2 shard=2", 1):
        assert sum(each for name, each in counts.items() if "reduce_scatter" in name) == 4 * G
        assert sum(each for name, each in counts.items() if "allreduce" in name) == G + 2
