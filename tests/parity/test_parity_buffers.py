"""Running statistics at a step's edge (invariant 10), whatever way a module keeps them; and what leaves no trace."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from parity_engine import start
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from trimaran.batch import MicroBatch, RankBatch
from trimaran.data import Order
from trimaran.engine import try_micro_batch
from trimaran.layout import deal

SEED, NUM_SAMPLES, MOMENTUM = 3, 11, 0.1


class BatchNormed(nn.Module):
    """A convolution, BatchNorm in training, one that is frozen, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3, momentum=MOMENTUM)
        self.frozen = nn.BatchNorm2d(3)
        self.frozen.running_mean += 0.3
        self.frozen.eval()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))
        self.head = nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.frozen(self.norm(self.conv(image))) * self.scale
        return self.head(self.dropout(x.relu()).mean((2, 3)))


def images() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {"image": torch.randn(2, 4, 4, generator=generator) + index, "target": torch.randn(2, generator=generator)}
        for index in range(NUM_SAMPLES)
    ]


def image_job(global_batch: int, dropout: float = 0.0, steps: int = 2) -> tm.Job:
    return tm.Job(
        model=lambda: BatchNormed(dropout),
        data=images(),
        inputs=("image",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.sgd(lr=0.01),
        global_batch=global_batch,
        steps=steps,
        seed=SEED,
    )


def state_after(global_batch: int, micro_batch: int, steps: int) -> dict[str, Tensor]:
    engine, loader, _ = start(image_job(global_batch, steps=steps), micro_batch=micro_batch)
    for batch in loader:
        assert not engine.step(batch).skipped
    return dict(engine.model.state_dict())


def expected_statistics(global_batch: int, dp: int, micro_batch: int) -> tuple[Tensor, Tensor, int]:
    """By hand, after one step: each rank's statistics over its own micro-batches in turn, then the mean over ranks."""
    torch.manual_seed(SEED)
    conv = BatchNormed().double().conv
    data = images()
    _, ids = Order(NUM_SAMPLES, SEED).at(torch.arange(global_batch).numpy())
    means, variances, counts = [], [], []
    for rank in range(dp):
        mean, variance, count = torch.zeros(3).double(), torch.ones(3).double(), 0
        for cut in deal(start=0, stop=global_batch, dp=dp, dp_rank=rank, micro_batch=micro_batch):
            if cut.weightless:
                continue
            values = conv(torch.stack([data[at]["image"] for at in ids[cut.start : cut.stop].tolist()]).double())
            mean = (1 - MOMENTUM) * mean + MOMENTUM * values.mean((0, 2, 3))
            variance = (1 - MOMENTUM) * variance + MOMENTUM * values.var((0, 2, 3))
            count += 1
        if count:
            means.append(mean)
            variances.append(variance)
            counts.append(count)
    return torch.stack(means).mean(0).detach(), torch.stack(variances).mean(0).detach(), max(counts)


@pytest.mark.parametrize(
    ("dp", "global_batch", "micro_batch"),
    [(1, 5, 2), (2, 5, 2), (3, 5, 1), (3, 2, 1), (4, 9, 2)],
    ids=["alone", "uneven", "one rank short", "one rank without a sample", "four ranks"],
)
def test_statistics_are_the_mean_over_ranks(pool: Pool, dp: int, global_batch: int, micro_batch: int) -> None:
    states = pool.run(state_after, dp, global_batch, micro_batch, 1)
    mean, variance, count = expected_statistics(global_batch, dp, micro_batch)
    for state in states:
        torch.testing.assert_close(state["norm.running_mean"], mean, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(state["norm.running_var"], variance, rtol=1e-12, atol=1e-14)
        assert state["norm.num_batches_tracked"] == count
        # What is frozen or constant stays, bit for bit.
        assert torch.equal(state["frozen.running_mean"], torch.full((3,), 0.3).double())
        assert state["frozen.num_batches_tracked"] == 0
        assert state["scale"].flatten().tolist() == [1.0, 2.0, 3.0]


def test_every_rank_saves_the_same_after_several_steps(pool: Pool) -> None:
    states = pool.run(state_after, 3, 4, 1, 4)
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])


def gradients_of(global_batch: int, micro_batch: int, dropout: float) -> dict[str, Tensor]:
    engine, loader, _ = start(image_job(global_batch, dropout), micro_batch=micro_batch)
    engine.accumulate(next(iter(loader)))
    return {name: each.grad.clone() for name, each in engine.model.named_parameters()}


def test_the_same_cut_gives_the_same_gradients(pool: Pool) -> None:
    """BatchNorm normalises by the micro-batch, and dropout draws for it, wherever it runs."""
    alone = pool.run(gradients_of, 1, 8, 2, 0.5)[0]
    for dp in (2, 4):
        for gradients in pool.run(gradients_of, dp, 8, 2, 0.5):
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, alone[name], rtol=1e-12, atol=1e-14)


# ── Other running statistics ────────────────────────────────────────────────────────────────────────────────────────

Way = Literal["in place", "replaced", "through data"]


class Keeper(nn.Module):
    """Keeps the last mean of what it saw: only of what is positive, so that some ranks never write."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.way = way
        self.register_buffer("seen", torch.full((2,), 7.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            new = torch.full_like(self.seen, float(x.mean()))
            if self.way == "in place":
                self.seen.copy_(new)
            elif self.way == "replaced":
                self.seen = new
            else:
                self.seen.data.copy_(new)
            self.count += 1
            self.started |= True
        self.cache = x.detach().mean()[None]
        return self.linear(x) * self.constant[0]


def kept(way: Way, values: list[list[float]], steps: int) -> list[tuple[list[float], int, bool, float, list[float]]]:
    """After each step, the buffers of this rank, whose micro-batches hold `values[rank]` (0: a weightless one)."""
    job = tm.Job(
        model=lambda: Keeper(way),
        data=[{}],
        inputs=("x",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.sgd(lr=0.01),
        global_batch=4,
        steps=steps,
    )
    engine, _, _ = start(job)
    micro_batches = tuple(
        MicroBatch({"x": torch.tensor([[value or 99.0]]), "target": torch.zeros(1, 1)}, 0, 1, weightless=value == 0)
        for value in values[dist.get_rank()]
    )
    found = []
    for step in range(steps):
        engine.step(RankBatch(step, 4, micro_batches))
        model = engine.model
        found.append(
            (
                model.seen.tolist(),
                int(model.count),
                bool(model.started),
                float(model.cache),
                model.constant.tolist(),
            )
        )
    return found


@pytest.mark.parametrize("way", ["in place", "replaced", "through data"])
def test_any_saved_buffer_is_averaged_over_the_ranks_that_changed_it(pool: Pool, way: Way) -> None:
    # Rank 0 sees 2 then 4, rank 1 only what is negative, rank 2 sees 10 and a weightless one.
    ranks = pool.run(kept, 3, way, [[2.0, 4.0], [-1.0, -3.0], [10.0, 0.0]], 2)
    for number, rank in enumerate(ranks):
        assert [step[0] for step in rank] == [[7.0, 7.0], [7.0, 7.0]]  # (4 + 10) / 2
        assert [step[1] for step in rank] == [2, 4]
        assert rank[-1][2] is True
        assert rank[-1][3] == [4.0, -3.0, 99.0][number]  # not saved: each rank's own
        assert rank[-1][4] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("way", ["in place", "replaced", "through data"])
def test_weightless_micro_batches_leave_buffers_alone(pool: Pool, way: Way) -> None:
    ranks = pool.run(kept, 2, way, [[3.0], [0.0]], 2)
    for rank in ranks:
        assert [step[0] for step in rank] == [[3.0, 3.0]] * 2
        assert [step[1] for step in rank] == [1, 2]


# ── A dry micro-batch ───────────────────────────────────────────────────────────────────────────────────────────────


def first_step(*, with_trial: bool) -> tuple[dict[str, Tensor], float, bool]:
    job = image_job(5, dropout=0.5)
    engine, loader, _ = start(job, precision="fp32", micro_batch=2)
    batch = next(iter(loader))
    unchanged = True
    if with_trial:
        before, state = torch.get_rng_state(), copy.deepcopy(engine.model.state_dict())
        try_micro_batch(engine, batch.micro_batches[0], job.input_keys)
        after = engine.model.state_dict()
        unchanged = all(torch.equal(state[name], after[name]) for name in state)
        unchanged &= torch.equal(before, torch.get_rng_state())
        unchanged &= all(each.grad is None for each in engine.model.parameters())
    result = engine.step(batch)
    return dict(engine.model.state_dict()), result.loss, unchanged


@pytest.mark.parametrize("dp", [1, 3])
def test_a_dry_micro_batch_leaves_no_trace(pool: Pool, dp: int) -> None:
    tried, untried = (pool.run(first_step, dp, with_trial=each) for each in (True, False))
    for (state, loss, unchanged), (expected, expected_loss, _) in zip(tried, untried, strict=True):
        assert unchanged
        assert loss == expected_loss
        assert all(torch.equal(state[name], expected[name]) for name in expected)
