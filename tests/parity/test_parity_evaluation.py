"""Evaluation and metrics are exact on shards of unequal size, and leave the model as it was (invariant 4)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity_engine import join
from parity_jobs import SEED, Case, Transformer, build_job, token_samples
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.engine import Engine, build_engine
from trimaran.layout import Layout


def open_evaluation(job: tm.Job, micro_batch: int) -> tuple[Engine, BatchLoader]:
    """Engine and this rank's share of the validation data, dealt as a run deals it."""
    dp = dist.get_world_size() if dist.is_initialized() else 1
    layout = Layout(precision="fp64", micro_batch=micro_batch).resolve(world_size=dp, global_batch=dp * micro_batch)
    world = join(layout)
    assert job.valid is not None
    loader = build_loader(
        job.valid,
        collate=job.collate,
        order=Order(len(job.valid), job.seed, shuffle=False),
        global_batch=dp * micro_batch,
        total_samples=len(job.valid),
        dp=dp,
        dp_rank=world.place.dp,
        micro_batch=micro_batch,
    )
    return build_engine(job, layout, world), loader


def evaluate(num_samples: int, micro_batch: int) -> dict[str, float]:
    job = build_job(Case())
    engine, loader = open_evaluation(
        tm.Job(**{**vars(job), "valid": token_samples(num_samples, seed=3)}), micro_batch=micro_batch
    )
    return engine.evaluate(loader)


def plain_evaluation(num_samples: int) -> dict[str, float]:
    torch.manual_seed(SEED)
    model = Transformer().double().eval()
    samples = token_samples(num_samples, seed=3)
    tokens = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    with torch.no_grad():
        logits, labels = model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    counted = labels != -100
    return {
        "loss": float(F.cross_entropy(logits, labels, ignore_index=-100)),
        "accuracy": float((logits.argmax(-1) == labels)[counted].double().mean()),
    }


@pytest.mark.parametrize(("num_samples", "micro_batch"), [(13, 2), (5, 1), (2, 1), (3, 4)])
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_figures_are_those_of_one_process(pool: Pool, dp: int, num_samples: int, micro_batch: int) -> None:
    expected = plain_evaluation(num_samples)
    figures = pool.run(evaluate, dp, num_samples, micro_batch)
    assert all(each == figures[0] for each in figures)
    assert figures[0] == pytest.approx(expected, rel=1e-12, abs=0)


def test_where_nothing_counts_there_is_no_figure(pool: Pool) -> None:
    for figures in pool.run(evaluate_what_ignores_all, 2):
        assert all(value != value for value in figures.values())


def evaluate_what_ignores_all() -> dict[str, float]:
    job = build_job(Case())
    engine, loader = open_evaluation(tm.Job(**{**vars(job), "valid": token_samples(10)[3::5]}), micro_batch=1)
    return engine.evaluate(loader)


class Fickle(nn.Module):
    """Changes buffers in every forward, in every way there is; draws; and changes weights when its mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm, self.frozen_norm = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)
        self.frozen_norm.eval()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(2))

    def train(self, mode: bool = True) -> Fickle:
        if mode != self.training:  # as adapters do that merge their weights in eval mode
            self.linear.weight.data *= 3.0 if mode else 1 / 3
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.replaced = self.replaced + 1
        self.hidden.data += 1
        y = self.frozen_norm(self.norm(self.linear(x)))
        return self.dropout(y) + torch.rand_like(y)


def evaluate_fickle() -> tuple[bool, bool, list[bool], dict[str, float], dict[str, float]]:
    samples = [{"x": torch.full((3,), float(index)), "target": torch.ones(2)} for index in range(7)]
    job = tm.Job(
        model=lambda: Fickle(),
        data=samples,
        valid=samples,
        inputs=("x",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.sgd(lr=0.1),
        global_batch=4,
        steps=2,
    )
    engine, loader = open_evaluation(job, micro_batch=2)
    before, modes = copy.deepcopy(engine.model.state_dict()), [each.training for each in engine.model.modules()]
    first = engine.evaluate(loader)
    torch.manual_seed(dist.get_rank())
    second = engine.evaluate(loader)
    after = engine.model.state_dict()
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    same_modes = modes == [each.training for each in engine.model.modules()]
    return unchanged, same_modes, modes, first, second


def test_model_is_as_before_and_draws_are_repeated(pool: Pool) -> None:
    for unchanged, same_modes, modes, first, second in pool.run(evaluate_fickle, 2):
        assert unchanged
        assert same_modes
        assert True in modes
        assert False in modes
        assert first == second
