"""Parameter groups by name: who decays, at which rate, in which order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimaran.errors import OptimizerError
from trimaran.optim import adamw, by_reference, sgd


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)


def settings_of(optimizer: torch.optim.Optimizer, option: str) -> dict[str, float]:
    return {name: group[option] for group in optimizer.param_groups for name in group["names"]}


def test_weights_decay_and_biases_and_norms_do_not() -> None:
    optimizer = adamw(1e-3, weight_decay=0.1).build(Net().named_parameters(), 1e-3)
    decay = settings_of(optimizer, "weight_decay")
    assert {name for name, value in decay.items() if value == 0.1} == {
        "embed.weight",
        "blocks.0.0.weight",
        "blocks.1.0.weight",
        "head.weight",
    }
    assert set(decay.values()) == {0.1, 0.0}
    assert decay.keys() == dict(Net().named_parameters()).keys()


def test_names_stand_beside_their_parameters_in_the_order_of_the_model() -> None:
    model = Net()
    optimizer = sgd(0.1).build(model.named_parameters(), 0.1)
    (group,) = optimizer.param_groups  # no decay anywhere: one group
    assert group["names"] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
    assert group["base_lr"] == group["lr"] == 0.1


def test_no_decay_adds_names() -> None:
    optimizer = adamw(1e-3, weight_decay=0.1, no_decay=("embed.*", "head.weight")).build(Net().named_parameters(), 1e-3)
    decay = settings_of(optimizer, "weight_decay")
    assert (decay["embed.weight"], decay["head.weight"], decay["blocks.0.0.weight"]) == (0.0, 0.0, 0.1)


def test_the_first_matching_glob_decides_and_may_decay_a_bias() -> None:
    groups = {
        "blocks.0.*": {"lr_scale": 0.1},
        "blocks.*.bias": {"weight_decay": 0.5},
        "head.*": {"lr": 1e-2, "betas": (0.5, 0.9)},
    }
    optimizer = adamw(1e-3, weight_decay=0.1, groups=groups).build(Net().named_parameters(), 2e-3)
    rates, decay, betas = (settings_of(optimizer, option) for option in ("base_lr", "weight_decay", "betas"))
    assert rates["blocks.0.0.bias"] == pytest.approx(2e-4)
    assert decay["blocks.0.0.bias"] == 0.0
    assert decay["blocks.1.0.bias"] == decay["blocks.1.1.bias"] == 0.5
    assert rates["head.weight"] == pytest.approx(2e-2)  # its own rate, scaled as everyone's: twice
    assert (betas["head.weight"], betas["embed.weight"]) == ((0.5, 0.9), (0.9, 0.999))
    assert rates["embed.weight"] == 2e-3
    assert settings_of(optimizer, "lr") == rates


def test_frozen_parameters_stay_out_and_their_globs_stand() -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    optimizer = adamw(1e-3, groups={"embed.*": {"lr_scale": 0.1}}).build(model.named_parameters(), 1e-3)
    assert "embed.weight" not in settings_of(optimizer, "lr")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(OptimizerError, match="None of the model's 10 parameters"):
        adamw(1e-3).build(model.named_parameters(), 1e-3)


def test_groups_are_the_same_on_meta_and_in_any_precision() -> None:
    def names(model: nn.Module) -> list[list[str]]:
        return [group["names"] for group in adamw(1e-3).build(model.named_parameters(), 1e-3).param_groups]

    assert names(Net()) == names(Net().double()) == names(Net().to("meta"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_decay": ("embedding.*",)}, ["'embedding.*' in no_decay matches no parameter", "embed.weight"]),
        ({"groups": {"block.*": {"lr_scale": 2.0}}}, ["'block.*' in groups", "blocks."]),
        ({"groups": {"*": {"lr_scale": 2.0}, "head.*": {"lr_scale": 3.0}}}, ["'head.*'", "no effect", "'*' before it"]),
    ],
)
def test_globs_without_effect_are_named(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        adamw(1e-3, **options).build(Net().named_parameters(), 1e-3)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("builder", [adamw, sgd, lambda lr, **kw: by_reference(torch.optim.RMSprop, lr, **kw)])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_decay": "bias"}, ["('bias',)"]),
        ({"groups": {"head.*": {"weight_decy": 0.0}}}, ["'weight_decy'", "Did you mean 'weight_decay'?"]),
        ({"groups": {"head.*": {"lr": 1.0, "lr_scale": 1.0}}}, ["both"]),
        ({"groups": {"head.*": {"lr_scale": 0.0}}}, ["'lr_scale': 0.0", "requires_grad"]),
        ({"groups": {"head.*": 0.1}}, ["glob"]),
        ({"groups": ["head.*"]}, ["glob"]),
    ],
)
def test_wrong_groups_are_refused_before_anything_is_built(
    builder: type[adamw], options: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(OptimizerError) as caught:
        builder(1e-3, **options)
    for word in words:
        assert word in str(caught.value)
