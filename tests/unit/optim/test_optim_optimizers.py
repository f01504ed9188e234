"""AdamW, SGD and classes by reference: the updates of plain torch, the scaling rule, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimaran.errors import OptimizerError
from trimaran.job import OptimizerBuilder
from trimaran.optim import adamw, by_reference, sgd


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> None:
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        optimizer.step()


def plain_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


CASES: list[tuple[OptimizerBuilder, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    (
        adamw(1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda m: torch.optim.AdamW(plain_groups(m, 0.1), lr=1e-2, betas=(0.8, 0.95), eps=1e-6, foreach=False),
    ),
    (
        sgd(1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda m: torch.optim.SGD(plain_groups(m, 0.1), lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
    ),
    (sgd(1e-2), lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, foreach=False)),
    (
        by_reference(torch.optim.RMSprop, 1e-2, alpha=0.9, weight_decay=0.1),
        lambda m: torch.optim.RMSprop(plain_groups(m, 0.1), lr=1e-2, alpha=0.9),
    ),
    (  # the class's own default decays too, and spares the biases
        by_reference(torch.optim.AdamW, 1e-2),
        lambda m: torch.optim.AdamW(plain_groups(m, 0.01), lr=1e-2),
    ),
]


@pytest.mark.parametrize(("builder", "plain"), CASES)
def test_five_steps_are_those_of_plain_torch(
    builder: OptimizerBuilder, plain: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    ours, theirs = model_of(), model_of()
    train(ours, builder.build(ours.named_parameters(), 1e-2))
    train(theirs, plain(theirs))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("builder", [adamw(1e-2), sgd(1e-2, momentum=0.9)])
def test_fused_on_the_cpu_and_plain_on_meta(builder: OptimizerBuilder, dtype: torch.dtype) -> None:
    on_cpu = builder.build(model_of(dtype).named_parameters(), 1e-2)
    on_meta = builder.build(model_of(dtype).to("meta").named_parameters(), 1e-2)
    assert [on_cpu.defaults["fused"], on_meta.defaults["fused"]] == [True, False]


def poison(model: nn.Module) -> None:
    """Gradients that are not finite, and freed memory full of them, for a kernel that forgets to clear its own."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    leftovers = [torch.full_like(p, torch.nan) for p in model.parameters() for _ in range(50)]
    del leftovers


@pytest.mark.parametrize(
    "builder",
    [
        adamw(1e-2),
        sgd(1e-2, momentum=0.9),
        by_reference(torch.optim.SGD, 1e-2, momentum=0.9, fused=True),
        by_reference(torch.optim.Adam, 1e-2, fused=True),
    ],
)
def test_a_skipped_first_step_leaves_no_trace(builder: OptimizerBuilder) -> None:
    """What the engine builds on: fused optimizers divide by grad_scale and skip at found_inf, on the device."""
    skipped, fresh = model_of(), model_of()
    optimizer = builder.build(skipped.named_parameters(), 1e-2)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    poison(skipped)
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0)
    train(skipped, optimizer, 2)
    train(fresh, builder.build(fresh.named_parameters(), 1e-2), 2)
    for a, b in zip(skipped.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("builder", [adamw(1e-2), sgd(1e-2, momentum=0.9)])
def test_grad_scale_divides_the_gradients_in_place(builder: OptimizerBuilder) -> None:
    scaled, plain = model_of(), model_of()
    optimizers = [builder.build(model.named_parameters(), 1e-2) for model in (scaled, plain)]
    for model, factor in ((scaled, 8.0), (plain, 1.0)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3 * factor)
    optimizers[0].grad_scale = torch.tensor(8.0)
    for optimizer in optimizers:
        optimizer.step()
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("builder", "global_batch", "value", "reason"),
    [
        (
            sgd(3e-4, at_batch=256),
            512,
            6e-4,
            "3e-4 at batch 256 → 6e-4 at 512 (linear, Goyal et al. 2017)",
        ),
        (
            adamw(1e-3, at_batch=64),
            256,
            2e-3,
            "1e-3 at batch 64 → 2e-3 at 256 (square root, Malladi et al. 2022)",
        ),
        (adamw(1e-3, at_batch=64), 16, 5e-4, "1e-3 at batch 64 → 5e-4 at 16 (square root, Malladi et al. 2022)"),
        (adamw(1e-3, at_batch=64), 64, 1e-3, "1e-3 at batch 64"),
        (adamw(3e-4), 512, 3e-4, "3e-4 (no at_batch: not scaled)"),
        (adamw(1e-3, at_batch=64, rule=None), 256, 1e-3, "1e-3 at batch 64, kept at 256 (rule=None: not scaled)"),
        (
            by_reference(torch.optim.RMSprop, 0.1, at_batch=8, rule="linear"),
            4,
            0.05,
            "0.1 at batch 8 → 0.05 at 4 (linear, Goyal et al. 2017)",
        ),
        (by_reference(torch.optim.RMSprop, 0.1), 4, 0.1, "0.1 (no at_batch: not scaled)"),
    ],
)
def test_the_rate_follows_the_batch_and_says_how(
    builder: OptimizerBuilder, global_batch: int, value: float, reason: str
) -> None:
    rate = builder.rate(global_batch)
    assert rate.value == pytest.approx(value, rel=1e-12)
    assert rate.reason == reason


def test_unscaled_rates_keep_their_bits() -> None:
    optimizer = adamw(0.1 + 0.2, at_batch=7).build(model_of().named_parameters(), adamw(0.1 + 0.2).rate(7).value)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 + 0.2}


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (
            adamw(3e-4, betas=(0.9, 0.95), weight_decay=0.1, at_batch=64),
            "adamw(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, at_batch=64, rule=sqrt)",
        ),
        (adamw(0.00012345, rule=None), "adamw(lr=0.00012345, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)"),
        (
            sgd(0.1, momentum=0.9, no_decay=["a.*"], groups={"b.*": {"lr_scale": 0.5}}),
            "sgd(lr=0.1, momentum=0.9, nesterov=False, weight_decay=0, no_decay=(a.*), groups={b.*: {lr_scale: 0.5}}, "
            "rule=linear)",
        ),
        (by_reference(torch.optim.RMSprop, 1, alpha=0.9), "torch.optim.rmsprop.RMSprop(lr=1, alpha=0.9)"),
    ],
)
def test_descriptions_are_complete_and_stable(builder: OptimizerBuilder, text: str) -> None:
    assert builder.describe() == text
    assert isinstance(builder, OptimizerBuilder)


class Wrapper(torch.optim.SGD):
    """Passes its keywords on, as many optimizers do."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


class NoRate(torch.optim.SGD):
    def __init__(self, params: Any, speed: float) -> None:
        super().__init__(params, lr=speed)


class Demanding(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, horizon: int) -> None:
        super().__init__(params, lr=lr)


def test_a_class_that_passes_keywords_on_decays_like_the_others() -> None:
    groups = by_reference(Wrapper, 0.1, weight_decay=0.3).build(model_of().named_parameters(), 0.1).param_groups
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}


NAMED = [("w", nn.Parameter(torch.zeros(2)))]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adamw(0.0), ["lr=0.0", "above 0"]),
        (lambda: sgd(-1), ["lr=-1"]),
        (lambda: sgd("0.1"), ["lr='0.1'"]),
        (lambda: sgd(float("nan")), ["lr=nan"]),
        (lambda: by_reference(torch.optim.SGD, float("inf")), ["lr=inf"]),
        (lambda: adamw(1e-3, at_batch=0), ["at_batch=0"]),
        (lambda: adamw(1e-3, at_batch=64.0), ["at_batch=64.0"]),
        (lambda: adamw(1e-3, rule="square"), ["rule='square'", '"sqrt", "linear" or None']),
        (lambda: adamw(1e-3, betas=(0.9, 1.0)), ["betas=(0.9, 1.0)"]),
        (lambda: adamw(1e-3, betas=0.9), ["betas=0.9"]),
        (lambda: adamw(1e-3, groups={"w": {"betas": (0.9,)}}), ["betas=(0.9,)"]),
        (lambda: adamw(1e-3, eps=-1.0), ["eps=-1.0"]),
        (lambda: adamw(1e-3, weight_decay=-0.1), ["weight_decay=-0.1"]),
        (lambda: sgd(0.1, momentum=-0.5), ["momentum=-0.5"]),
        (lambda: sgd(0.1, momentum=1.0), ["momentum=1.0"]),
        (lambda: sgd(0.1, nesterov=True), ["momentum=0.9"]),
        (lambda: sgd(0.1, weight_decay=None), ["weight_decay=None"]),
        (
            lambda: by_reference(torch.optim.SGD(NAMED[0][1:], lr=1), 0.1),
            ["an instance of SGD", "by_reference(SGD, lr="],
        ),
        (lambda: by_reference("SGD", 0.1), ["'SGD'", "torch.optim.RMSprop"]),
        (lambda: by_reference(nn.Linear, 0.1), ["Linear"]),
        (lambda: by_reference(torch.optim.LBFGS, 0.1), ["LBFGS.step needs a closure"]),
        (lambda: by_reference(torch.optim.RMSprop, 0.1, alhpa=0.9), ["'alhpa'", "Did you mean 'alpha'?"]),
        (lambda: by_reference(NoRate, 0.1), ["takes no 'lr'"]),
        (lambda: by_reference(Demanding, 0.1), ["horizon"]),
        (lambda: by_reference(torch.optim.Rprop, 0.1, no_decay=("w",)), ["takes no weight_decay"]),
        (lambda: by_reference(Wrapper, 0.1, horizon=3).build(NAMED, 0.1), ["Wrapper refused", "horizon"]),
        (lambda: by_reference(torch.optim.RMSprop, 0.1, alpha=-1.0).build(NAMED, 0.1), ["refused", "alpha"]),
        (
            lambda: by_reference(torch.optim.SGD, 0.1, momentum=0.9, dampening=0.1, fused=True).build(NAMED, 0.1),
            ["dampening", "Drop fused=True"],
        ),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(OptimizerError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert caught.value.rule
    assert caught.value.remedy
