"""First weights are the constructor's under the seed, in every precision; what has no weights is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimaran.engine.init import build_model, cast_parameters
from trimaran.errors import JobError


class Drawing(nn.Module):
    """Draws from every default generator, as a constructor may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.of_numpy = nn.Parameter(torch.tensor(np.random.rand(2)).float())
        self.of_python = nn.Parameter(torch.tensor(random.random()))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = nn.Parameter(self.linear.weight.detach().T.clone())
        self.tied = self.head
        self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16) / 3)
        self.whole = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("table", torch.rand(2), persistent=False)
        self.shares = nn.ModuleList([nn.Identity(), nn.Identity()])
        for share in self.shares:
            share.register_buffer("table", self.table)


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_weights_are_the_plain_constructors(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    expected = Drawing().state_dict()
    torch.rand(3)
    actual = build_model(lambda: Drawing(), seed).state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_float64_is_the_same_values_in_more_bits() -> None:
    narrow, wide = build_model(lambda: Drawing(), 1), build_model(lambda: Drawing(), 1)
    cast_parameters(narrow, torch.float32)
    cast_parameters(wide, torch.float64)
    for (name, one), (_, other) in zip(narrow.state_dict().items(), wide.state_dict().items(), strict=True):
        kinds = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        assert other.dtype == kinds.get(one.dtype, one.dtype), name
        assert torch.equal(one.to(other.dtype), other)
    assert narrow.short.dtype == torch.float32
    assert wide.table.dtype == torch.float64


def test_casting_keeps_what_is_shared() -> None:
    model = build_model(lambda: Drawing(), 1)
    identities = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    cast_parameters(model, torch.float64)
    assert identities == {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    assert model.tied.weight is model.head.weight
    assert model.shares[0].table is model.shares[1].table is model.table
    assert "table" not in model.state_dict()


def _module_with(parameter: Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(parameter)
    return module


def _tied_by_data() -> nn.Module:
    module = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    module["head"].weight.data = module["embed"].weight.data
    return module


@pytest.mark.parametrize(
    ("constructor", "message"),
    [
        (lambda: "a model", "returned str"),
        (lambda: nn.Identity(), "no parameter that requires a gradient"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)), "no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta device"),
        (_tied_by_data, "embed.weight and head.weight are two"),
    ],
)
def test_what_has_no_weights_of_its_own_is_refused(constructor: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(JobError, match=message):
        build_model(constructor, 0)


def test_parameters_without_elements_do_not_share_their_memory() -> None:
    build_model(lambda: nn.ModuleList([_module_with(torch.zeros(0)), _module_with(torch.zeros(0))]), 0)


@pytest.mark.parametrize(
    "make", [lambda: torch.rand(4, 8)[:, :5], lambda: torch.rand(6)[::2], lambda: torch.rand(1).expand(3)]
)
def test_parameters_with_gaps_in_memory_are_made_dense(make: Callable[[], Tensor]) -> None:
    torch.manual_seed(3)
    values = make()
    extra = build_model(lambda: _module_with(make()), 3).extra
    assert torch.equal(extra, values)
    assert extra.is_contiguous()


def test_dense_parameters_keep_their_strides() -> None:
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    strides = module.weight.stride()
    model = build_model(lambda: module, 0)
    cast_parameters(model, torch.float64)
    assert model.weight.stride() == strides


class Saving(nn.Module):
    """A linear layer with something more in its state."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("buffer", buffer)


class Telling(Saving):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Saving(torch.eye(2).to_sparse()), "buffer of the model's state_dict is a tensor of layout"),
        (Telling, "_extra_state of the model's state_dict is dict"),
    ],
)
def test_what_could_not_be_saved_at_the_end_is_refused_at_the_start(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        build_model(make, seed=0)
