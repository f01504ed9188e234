"""Losses and metrics of classifiers, of regression, and of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trimaran.errors import LossError
from trimaran.job import Loss
from trimaran.losses import accuracy, cross_entropy, custom, mse

C = 4


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("shape", "class_dim"), [((6,), -1), ((3, 5), -1), ((2, 3, 4), -1), ((6,), 1), ((3, 5), 1), ((2, 3, 4), 1)]
)
def test_cross_entropy_equals_plain_torch(shape: tuple[int, ...], class_dim: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(C, shape, generator=generator)
    labels.view(-1)[1::3] = -100
    logits = torch.randn(*shape, C, generator=generator, dtype=torch.float64)
    flat = F.cross_entropy(logits.reshape(-1, C), labels.reshape(-1), reduction="sum", label_smoothing=smoothing)
    loss = cross_entropy(class_dim=class_dim, label_smoothing=smoothing)
    total = loss.total(logits.movedim(-1, class_dim), {"label": labels})
    assert total.item() == pytest.approx(flat.item(), rel=1e-12)
    assert loss.weight({"label": labels}).item() == (labels != -100).sum().item()


def test_cross_entropy_of_ignored_labels_only_is_zero_without_nan() -> None:
    logits = torch.randn(3, C, requires_grad=True)
    total = cross_entropy(label_smoothing=0.1).total(logits, {"label": torch.full((3,), -100)})
    total.backward()
    assert total.item() == 0
    assert torch.equal(logits.grad, torch.zeros(3, C))


def test_parts_add_up_to_the_whole() -> None:
    logits, labels = torch.randn(7, C, dtype=torch.float64), torch.randint(C, (7,))
    labels[2] = -100
    for loss in (cross_entropy(), accuracy(), accuracy(top=2)):
        parts = [(logits[s], {"label": labels[s]}) for s in (slice(0, 3), slice(3, 7))]
        assert sum(loss.weight(b) for _, b in parts) == loss.weight({"label": labels}) == 6
        whole = loss.total(logits, {"label": labels})
        torch.testing.assert_close(sum(loss.total(o, b) for o, b in parts), whole)


@pytest.mark.parametrize(("top", "right"), [(1, 1), (2, 2), (4, 3)])
def test_accuracy_by_hand(top: int, right: int) -> None:
    logits = torch.tensor([[9.0, 1, 2, 3], [9.0, 1, 2, 3], [9.0, 1, 2, 3], [9.0, 1, 2, 3]])
    labels = torch.tensor([0, 3, 1, -100])
    loss = accuracy(top=top)
    assert loss.total(logits, {"label": labels}).item() == right
    assert loss.weight({"label": labels}).item() == 3
    planes = logits.T[None]  # [1, C, 4 positions]
    assert accuracy(top=top, class_dim=1).total(planes, {"label": labels[None]}).item() == right


@pytest.mark.parametrize(
    ("loss", "logits", "labels", "words"),
    [
        (cross_entropy(), torch.zeros(3, C), torch.zeros(2).long(), ["[3, 4]", "[2]"]),
        (cross_entropy(), torch.zeros(3, C), torch.zeros(3, 1).long(), ["[3, 1]", "Drop the labels' last dimension"]),
        (cross_entropy(), torch.zeros(3, C, 5), torch.zeros(3, 5).long(), ["class_dim=1"]),
        (accuracy(class_dim=1), torch.zeros(3, 5, C), torch.zeros(3, 5).long(), ["class_dim=-1"]),
        (cross_entropy(), torch.zeros(3), torch.zeros(3).long(), ["[3]"]),
        (cross_entropy(), torch.zeros(3, C), torch.eye(C)[:3], ["torch.float32", "custom"]),
        (cross_entropy(), torch.zeros(3, C), torch.tensor([0, 7, -100]), ["the label 7", "4 classes"]),
        (cross_entropy(class_dim=1), torch.zeros(1, C, 2), torch.tensor([[0, 7]]), ["the label 7", "4 classes"]),
        (accuracy(top=5), torch.zeros(3, C), torch.zeros(3).long(), ["top=5", "4 classes"]),
    ],
)
def test_what_does_not_fit_is_named(loss: Loss, logits: torch.Tensor, labels: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(LossError) as caught:
        loss.total(logits, {"label": labels})
    for word in words:
        assert word in str(caught.value)


def test_a_negative_class_is_caught_by_the_weight() -> None:
    with pytest.raises(LossError, match="the label -1"):
        cross_entropy().weight({"label": torch.tensor([0, -1])})
    assert cross_entropy(ignore_index=-1).weight({"label": torch.tensor([0, -1])}).item() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: cross_entropy(class_dim=2),
        lambda: cross_entropy(label_smoothing=-0.1),
        lambda: cross_entropy(target=""),
        lambda: accuracy(top=0),
        lambda: accuracy(top=True),
        lambda: mse(target=1),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Loss]) -> None:
    with pytest.raises(LossError):
        make()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mse_sums_squares_and_weighs_elements(dtype: torch.dtype) -> None:
    output, batch = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=dtype), {"target": torch.tensor([[1, 0], [0, 0]])}
    total = mse().total(output, batch)
    assert total.item() == 4 + 9 + 25
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (mse().weight(batch).item(), mse().weight(batch).dtype) == (4, torch.float64)


def test_mse_broadcasts_nothing() -> None:
    with pytest.raises(LossError, match=r"\[3, 1\].*\[3\]"):
        mse().total(torch.zeros(3, 1), {"target": torch.zeros(3)})
    with pytest.raises(LossError, match="'target'"):
        mse().weight({"x": torch.zeros(3)})


def _absolute_error(output: Any, batch: Any) -> torch.Tensor:
    return (output - batch["y"]).abs().sum()


def _num_samples(batch: Any) -> int:
    return len(batch["y"])


def test_custom_calls_both_functions() -> None:
    loss = custom(total=_absolute_error, weight=_num_samples)
    output = torch.tensor([1.0, 2.0], requires_grad=True)
    batch = {"y": torch.tensor([0.0, 4.0])}
    total = loss.total(output, batch)
    total.backward()
    assert (total.item(), output.grad.tolist()) == (3.0, [1.0, -1.0])
    assert (loss.weight(batch).item(), loss.weight(batch).dtype) == (2, torch.float64)
    assert isinstance(loss, Loss)


def test_custom_reads_the_same_in_every_run_and_is_equal_by_its_functions() -> None:
    loss = custom(total=_absolute_error, weight=_num_samples)
    assert repr(loss) == "custom(total=_absolute_error, weight=_num_samples)"
    assert loss == custom(total=_absolute_error, weight=_num_samples)
    assert "0x" not in repr(custom(total=functools.partial(_absolute_error), weight=lambda batch: 1))


@pytest.mark.parametrize(
    ("total", "weight", "word"),
    [
        (3, _num_samples, "total"),
        (_absolute_error, None, "weight"),
        (_num_samples, _num_samples, "total"),
        (_absolute_error, _absolute_error, "weight"),
    ],
)
def test_custom_refuses_what_cannot_be_called_so(total: Any, weight: Any, word: str) -> None:
    with pytest.raises(LossError, match=rf"custom\({word}="):
        custom(total=total, weight=weight)


def test_custom_refuses_results_that_are_no_scalars() -> None:
    batch = {"y": torch.zeros(2)}
    with pytest.raises(LossError, match=r"shape \[2\]"):
        custom(total=lambda o, b: o - b["y"], weight=_num_samples).total(torch.zeros(2), batch)
    with pytest.raises(LossError, match=r"without \.item"):
        custom(total=lambda o, b: 1.0, weight=_num_samples).total(torch.zeros(2), batch)
    with pytest.raises(LossError, match=r"weight returned a tensor of shape \[2\]"):
        custom(total=_absolute_error, weight=lambda b: torch.ones(2)).weight(batch)
    half = custom(total=lambda o, b: o.sum(), weight=_num_samples).total(torch.ones(2).bfloat16(), batch)
    assert half.dtype == torch.float32
