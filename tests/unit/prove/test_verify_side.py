"""One side: what is recorded of a few steps, and that it comes back from disk."""

from __future__ import annotations

import pytest
import torch
from prove_jobs import Net, job
from torch import Tensor, nn

import trimaran as tm
from trimaran.layout import Layout
from trimaran.prove.verify_run import run_side, turn_dropout_off
from trimaran.prove.verify_side import FIRST_GRADIENTS, FIRST_WEIGHTS, STATE, WEIGHTS, Side
from trimaran.world.groups import open_world


def side_of(job: tm.Job, layout: str = "precision=fp64", steps: int = 2) -> Side:
    resolved = Layout.parse(layout).resolve(world_size=1, global_batch=job.global_batch)
    return run_side(job, resolved, open_world(None, resolved, device="cpu"), steps=steps)


def test_what_a_side_holds() -> None:
    side = side_of(job(), "precision=fp64 micro_batch=12")
    names = ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert [*side.at(FIRST_WEIGHTS)] == [*side.at(FIRST_GRADIENTS)] == [*side.at(WEIGHTS)] == side.order == names
    assert set(side.at(STATE)) >= {"first.weight.exp_avg", "last.bias.exp_avg_sq"}
    assert len(side.losses) == len(side.norms) == 2
    assert side.cuts == [(0, 12), (12, 12), (24, 8)]
    assert side.weight == 32
    assert side.options["first.weight"]["weight_decay"] != side.options["first.bias"]["weight_decay"]
    assert {each.name for each in side.activations} == {"input x", "first", "last", "Net"}
    assert sum(len(each.values) for each in side.activations if each.name == "last") == 32
    assert side.collectives == {}
    assert not side.draws_numbers
    assert not side.unlike


def test_the_first_gradients_are_those_of_plain_torch() -> None:
    side = side_of(job())
    torch.manual_seed(0)
    model = Net().double()
    assert all(torch.equal(each, side.at(FIRST_WEIGHTS)[name]) for name, each in model.named_parameters())
    assert side.at(FIRST_GRADIENTS)["last.bias"].abs().sum() > 0
    assert not torch.equal(side.at(WEIGHTS)["last.bias"], side.at(FIRST_WEIGHTS)["last.bias"])


class Dropping(Net):
    """Dropout of torch's and of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(24, 2, dropout=0.2)
        self.attention_dropout = 0.5

    def middle(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(self.drop(h), self.attention_dropout)


def test_dropout_is_turned_off_and_told() -> None:
    found: list[str] = []
    model = turn_dropout_off(Dropping(), found)
    assert found == ["", "drop", "attention"]
    assert (model.drop.p, model.attention.dropout, model.attention_dropout) == (0.0, 0.0, 0.0)
    side = side_of(job(Dropping))
    assert side.dropout == found
    assert not side.draws_numbers


class Noisy(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h + torch.randn_like(h) if self.training else h


def test_a_forward_that_draws_is_noticed() -> None:
    assert side_of(job(Noisy)).draws_numbers


class Shared(Net):
    """Calls a layer twice, in another order than they are registered, and none of an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(12, 12)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.early(self.early(x)))


def test_order_and_calls() -> None:
    side = side_of(job(Shared))
    assert side.order.index("early.weight") < side.order.index("first.weight") < side.order.index("last.weight")
    assert {each.name for each in side.activations} >= {"early", "early, call 2"}


class Rowless(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def middle(self, h: Tensor) -> Tensor:
        return self.turn(h).T


class Turn(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.T


def test_outputs_without_a_row_for_each_sample_are_told() -> None:
    side = side_of(job(Rowless))
    assert side.rowless == ["turn"]


def test_what_a_run_would_refuse_is_refused() -> None:
    mean = tm.losses.custom(
        total=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]),
        weight=lambda batch: torch.tensor(len(batch["label"])),
    )
    with pytest.raises(tm.errors.LossError, match="returns a mean"):
        side_of(job(loss=mean))


def test_both_sides_in_this_process() -> None:
    result = tm.verify_job(job(), "micro_batch=12", steps=2, device="cpu")
    assert result is not None
    assert result.equal
    assert (result.layout, result.against) == (
        "dp=1 micro_batch=12 precision=fp64",
        "dp=1 micro_batch=32 precision=fp64",
    )
    with pytest.raises(tm.errors.UsageError, match="several processes"):
        tm.verify_job(job(), against="dp=2", device="cpu")
