"""Totals and weights, modes and buffers, the loss scale: the small parts by themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trimaran.engine.buffers import unchanged_buffers
from trimaran.engine.measure import evaluation_mode, measure, read_means
from trimaran.engine.precision import LossScale, upcast_output
from trimaran.losses import custom
from trimaran.world.rng import derive_seed


def test_means_are_totals_over_weights() -> None:
    sums = torch.zeros(2, 2, dtype=torch.float64)
    losses = [
        custom(total=lambda output, batch: output.sum(), weight=lambda batch: len(batch["x"])),
        custom(total=lambda output, batch: output.max(), weight=lambda batch: 0),
    ]
    for values in ([1.0, 2.0, 6.0], [5.0]):
        tensors = {"x": torch.tensor(values)}
        sums += measure(losses, tensors["x"], tensors)
    means = read_means(["mean", "nothing"], sums)
    assert means["mean"] == 3.5
    assert math.isnan(means["nothing"])


def test_modes_come_back_and_no_train_of_the_users_is_called() -> None:
    calls = []

    class Noted(nn.Linear):
        def train(self, mode: bool = True) -> Noted:
            calls.append(mode)
            return super().train(mode)

    model = nn.Sequential(Noted(1, 1), nn.Dropout(), nn.BatchNorm1d(1))
    model[2].eval()
    calls.clear()
    with evaluation_mode(model):
        assert not any(each.training for each in model.modules())
    assert [each.training for each in model.modules()] == [True, True, True, False]
    assert not calls


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)


def test_buffers_come_back_in_place_or_replaced() -> None:
    model = Buffered()
    state = model.state
    with unchanged_buffers(model):
        model.state += 1
        model.state = torch.ones(3)
        model.cache = torch.ones(4)  # a cache has grown, and its module may count on it
    assert model.state is state
    assert state.tolist() == [0.0, 0.0]
    assert model.cache.shape == (4,)


def test_buffers_that_a_backward_needs_may_be_put_back_before_it() -> None:
    """As where a frozen BatchNorm's statistics are saved for the backward: no version is counted."""
    model, weight = Buffered(), torch.ones(2, requires_grad=True)
    with unchanged_buffers(model):
        result = (weight * model.state).sum()
    version = model.state._version
    result.backward()
    assert model.state._version == version
    assert torch.equal(weight.grad, torch.zeros(2))


def test_the_scale_halves_at_once_and_doubles_after_a_while() -> None:
    scale = LossScale(value=8.0, growth_interval=3)
    values = []
    for skipped in (False, False, True, False, False, False, False):
        scale.update(skipped=skipped)
        values.append(scale.value)
    assert values == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    for _ in range(100):
        scale.update(skipped=True)
    assert scale.value == scale.smallest > 0


def test_only_halves_are_raised() -> None:
    wide = torch.ones(1, dtype=torch.float64)
    whole = torch.ones(1, dtype=torch.int64)
    output = {"half": torch.ones(1).bfloat16(), "wide": wide, "whole": whole, "text": "as it is", "none": None}
    raised = upcast_output(output)
    assert raised["half"].dtype == torch.float32
    assert raised["wide"] is wide
    assert raised["whole"] is whole
    assert raised["text"] == "as it is"


def test_seeds_of_neighbours_have_nothing_in_common() -> None:
    """Half of the bits differ on average, also in the low 32 that a CPU's generator takes."""
    parts = [(seed, step, position) for seed in range(4) for step in (-1, 0, 1, 2) for position in (0, 1, 8, 2**33)]
    seeds = [derive_seed(*each) for each in parts]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    distances = [(a ^ b).bit_count() for i, a in enumerate(seeds) for b in seeds[:i]]
    assert abs(sum(distances) / len(distances) - 31.5) < 0.5
    assert min(distances) > 8


def test_a_gradient_flows_through_raised_outputs() -> None:
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    output: tuple[Tensor, list[Tensor]] = (half, [half * 2])
    raised = upcast_output(output)
    (raised[0].sum() + raised[1][0].sum()).backward()
    assert half.grad is not None
    assert half.grad.tolist() == [3.0, 3.0]
