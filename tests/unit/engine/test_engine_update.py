"""Norm, clip and update on tensors of every kind, against torch's own clipping and for-loop optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimaran.engine.norm import clip_coefficient, global_norm
from trimaran.engine.update import apply_update

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_elements", [1, 2**15, 2**15 + 1, 3_000_000])
def test_the_norm_is_exact_however_large_the_tensor(num_elements: int, dtype: torch.dtype) -> None:
    """torch's float32 norm on a CPU is off by 2e-5 at three million elements."""
    gradient = torch.randn(num_elements, dtype=dtype, generator=torch.Generator().manual_seed(0))
    gradients = [gradient, torch.full((3, 2), 2.0, dtype=dtype)]
    expected = torch.cat([each.flatten().double() for each in gradients]).norm()
    actual = global_norm(gradients, device=CPU)
    assert actual.dtype == torch.float64
    assert float(actual) == pytest.approx(float(expected), rel=1e-12 if dtype == torch.float64 else 5e-7)


def test_the_norm_takes_any_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(300, 200, generator=generator).t(),
        torch.randn(8, 64, 9, 9, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.complex64, generator=generator),
        torch.zeros(0, 4),
        torch.tensor(2.5),
    ]
    expected = sum(float(each.abs().double().square().sum()) for each in gradients) ** 0.5
    assert float(global_norm(gradients, device=CPU)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("num_elements", [3, 100_000])
def test_one_bad_element_shows_in_the_norm(bad: float, num_elements: int) -> None:
    gradient = torch.zeros(num_elements)
    gradient[-1] = bad
    assert not torch.isfinite(global_norm([torch.ones(2), gradient], device=CPU))


@pytest.mark.parametrize("clip", [None, 0.1, 5.0, 1e9])
def test_the_coefficient_is_torchs(clip: float | None) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([3.0, -2.0, 1.0, 0.5])
    before = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], float("inf") if clip is None else clip)
    factor = clip_coefficient(norm.double(), clip)
    torch.testing.assert_close(before * factor, parameter.grad, check_dtype=False, rtol=1e-7, atol=0)


Build = Callable[..., torch.optim.Optimizer]


class OwnFused(torch.optim.SGD):
    """A class whose groups say fused, and whose step knows nothing of a scale."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["fused"] = True

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"] * parameter.grad


CASES: dict[str, tuple[Build, Build]] = {
    name: (actual, expected)
    for name, actual, expected in [
        (
            "fused adamw",
            lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        ),
        (
            "fused adam with amsgrad",
            lambda p: torch.optim.Adam(p, lr=0.1, fused=True, amsgrad=True),
            lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, amsgrad=True),
        ),
        (
            "fused sgd",
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        ),
        (
            "fused adagrad",
            lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
        ),
        (
            "rmsprop",
            lambda p: torch.optim.RMSprop(p, lr=0.1),
            lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=False),
        ),
        ("own", lambda p: OwnFused(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    ]
}


def parameters_with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    """Of odd layouts, and the gradients in the same."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for shape in ((3, 4), (2, 3, 2, 2), (5,), (), (0, 2)):
        value = torch.randn(shape, generator=generator, dtype=dtype)
        value = value.t() if value.ndim == 2 else value
        value = value.to(memory_format=torch.channels_last) if value.ndim == 4 else value
        parameter = nn.Parameter(value)
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(value.shape, generator=generator, dtype=dtype))
        made.append(parameter)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_three_updates_are_those_of_the_plain_optimizer(name: str, dtype: torch.dtype) -> None:
    build, build_expected = CASES[name]
    actual, expected = parameters_with_gradients(dtype), parameters_with_gradients(dtype)
    optimizer, expected_optimizer = build(actual), build_expected(expected)
    for factor in (0.25, 1.0, 1 / 3):
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine.grad is not None
            mine.grad.copy_(theirs.grad)
        gradients = [each.grad for each in actual if each.grad is not None]
        apply_update(
            optimizer, gradients, global_norm(gradients, device=CPU), torch.tensor(factor, dtype=torch.float64)
        )
        for theirs in expected:
            theirs.grad = theirs.grad * factor
        expected_optimizer.step()
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-6 if dtype == torch.float32 else 1e-13, atol=1e-7)
            theirs.grad = theirs.grad / factor


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in CASES if name != "fused sgd"])
def test_a_bad_norm_changes_nothing(name: str, dtype: torch.dtype, bad: float) -> None:
    parameters = parameters_with_gradients(dtype)
    optimizer = CASES[name][0](parameters)
    gradients = [each.grad for each in parameters if each.grad is not None]
    one = torch.ones((), dtype=torch.float64)
    apply_update(optimizer, gradients, global_norm(gradients, device=CPU), one)
    before = [each.detach().clone() for each in parameters]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    apply_update(optimizer, gradients, torch.tensor(bad, dtype=torch.float64), one * float("nan"))
    assert all(torch.equal(mine, old) for mine, old in zip(parameters, before, strict=True))
    for index, kinds in optimizer.state_dict()["state"].items():
        for kind, value in kinds.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, state[index][kind]), kind


def test_a_scale_is_not_left_behind() -> None:
    """A later step that a caller makes by hand is a plain one."""
    parameters = parameters_with_gradients(torch.float32)
    gradients = [each.grad for each in parameters if each.grad is not None]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    apply_update(optimizer, gradients, torch.tensor(float("nan")), torch.tensor(0.5))
    before = parameters[0].detach().clone()
    optimizer.step()
    assert torch.isfinite(parameters[0]).all()
    assert not torch.equal(parameters[0], before)


def test_complex_and_real_gradients_are_clipped_together() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.complex64)), nn.Parameter(torch.ones(2))]
    for each in parameters:
        each.grad = torch.ones_like(each)
    gradients = [each.grad for each in parameters if each.grad is not None]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    apply_update(optimizer, gradients, global_norm(gradients, device=CPU), torch.tensor(0.5, dtype=torch.float64))
    assert [each.tolist() for each in parameters] == [[0.5 + 0j] * 2, [0.5] * 2]
