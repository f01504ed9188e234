"""One dry micro-batch finds what would fail later, by name, and counts what a step computes."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran as tm
from trimaran.batch import MicroBatch
from trimaran.engine import Engine, Trial, build_engine, try_micro_batch
from trimaran.errors import JobError, LossError, NumericsError
from trimaran.job import Loss
from trimaran.layout import Layout, Precision
from trimaran.world.groups import open_world

WIDTH, CLASSES = 6, 5


class Classifier(nn.Module):
    """An embedding, a layer over each token, the mean over tokens, and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        return self.layer(self.embed(ids)).mean(1)


def build(
    model: Callable[[], nn.Module] = lambda: Classifier(),
    loss: Loss | None = None,
    inputs: Any = ("ids",),
    precision: Precision = "fp32",
) -> tuple[Engine, tm.Job]:
    job = tm.Job(
        model=model,
        data=[{}],
        inputs=inputs,
        loss=loss or tm.losses.cross_entropy(),
        optimizer=tm.optim.sgd(lr=0.1),
        global_batch=4,
        steps=1,
    )
    layout = Layout(precision=precision).resolve(world_size=1, global_batch=4)
    return build_engine(job, layout, open_world(None, layout, device="cpu")), job


def batch_of(num_samples: int = 5, labels: list[int] | None = None, **changes: Tensor) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "ids": torch.randint(9, (num_samples, 7), generator=generator),
        "label": torch.tensor(labels or [1, 0, 3, 2, 4, 1, 2][:num_samples]),
    }
    return MicroBatch({**tensors, **changes}, position=0, num_samples=num_samples)


def attempt(micro_batch: MicroBatch | None = None, **options: Any) -> Trial:
    engine, job = build(**options)
    return try_micro_batch(engine, micro_batch or batch_of(), job.input_keys)


def counted(batch: Any) -> Tensor:
    return (batch["label"] != -100).sum()


def sized(batch: Any) -> Tensor:
    return torch.tensor(len(batch["label"]))


def with_total(total: Callable[[Any, Any], Any], weight: Callable[[Any], Any] = counted) -> Loss:
    return tm.losses.custom(total=total, weight=weight)


@dataclass(frozen=True)
class PlainLoss:
    """A loss of a user's own class, unchecked by ours."""

    made_total: Callable[[Any, Any], Any] = lambda output, batch: F.cross_entropy(
        output, batch["label"], reduction="sum"
    )
    made_weight: Callable[[Any], Any] = counted

    def total(self, output: Any, batch: Any, /) -> Any:
        return self.made_total(output, batch)

    def weight(self, batch: Any, /) -> Any:
        return self.made_weight(batch)


# ── A mean, and what is not additive ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("num_samples", [1, 2, 5])
@pytest.mark.parametrize("labels", [None, [1, -100, 3, 2, 4]])
def test_a_mean_is_refused_by_name(precision: Precision, num_samples: int, labels: list[int] | None) -> None:
    """Over labels that count, in micro-batches that halve evenly or not."""
    loss = with_total(lambda output, batch: F.cross_entropy(output, batch["label"]))
    labels = labels[:num_samples] if labels else None
    with pytest.raises(LossError, match="returns a mean") as caught:
        attempt(batch_of(num_samples, labels), loss=loss, precision=precision)
    assert 'reduction="sum"' in caught.value.remedy


def test_a_mean_over_samples_is_refused_by_name_whatever_the_weight() -> None:
    loss = with_total(lambda output, batch: output.square().sum(-1).mean(), counted)
    with pytest.raises(LossError, match="returns a mean"):
        attempt(batch_of(labels=[1, -100, 3, 2, 4]), loss=loss)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_a_sum_passes(precision: Precision, num_samples: int) -> None:
    attempt(batch_of(num_samples), precision=precision)
    attempt(batch_of(num_samples, [-100] * num_samples), precision=precision)


@pytest.mark.parametrize("num_samples", [1, 5])
def test_a_loss_over_pairs_is_refused(num_samples: int) -> None:
    loss = with_total(lambda output, batch: (output @ output.T).square().sum(), sized)
    with pytest.raises(LossError, match="two halves together") as caught:
        attempt(batch_of(num_samples), loss=loss)
    assert "mean" not in caught.value.value


def test_a_weight_that_is_no_count_is_refused() -> None:
    with pytest.raises(LossError, match="weight is 1 for a batch and 2"):
        attempt(loss=with_total(lambda output, batch: output.sum(), lambda batch: 1.0))


@pytest.mark.parametrize("total", [lambda output, batch: 3.0, lambda output, batch: output.sum()[None]])
def test_a_total_is_one_number(total: Any) -> None:
    with pytest.raises(LossError, match="total"):
        attempt(loss=PlainLoss(made_total=total))


@pytest.mark.parametrize("weight", [lambda batch: 5, lambda batch: torch.ones(5)])
def test_a_weight_is_a_scalar_tensor(weight: Any) -> None:
    with pytest.raises(LossError, match=r"weight\(batch\) returned"):
        attempt(loss=PlainLoss(made_weight=weight))


def test_a_negative_weight_is_refused() -> None:
    loss = tm.losses.custom(
        total=lambda output, batch: F.cross_entropy(output, batch["label"], reduction="sum"),
        weight=lambda batch: -len(batch["label"]),
    )
    with pytest.raises(LossError, match=r"weight\(batch\) returned -5"):
        attempt(loss=loss)


def test_a_loss_that_is_not_finite_is_named() -> None:
    """The mean over no label at all is not a number, and the sum is 0."""
    loss = PlainLoss(made_total=lambda output, batch: F.cross_entropy(output, batch["label"]))
    with pytest.raises(NumericsError, match="nan"):
        attempt(batch_of(2, [-100, -100]), loss=loss)


# ── Keys, shapes, graphs ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_key_is_named() -> None:
    with pytest.raises(JobError, match="'tokens', and a batch has the keys 'ids', 'label'"):
        attempt(inputs={"ids": "tokens"})


def test_an_output_that_the_loss_cannot_read_is_named() -> None:
    class Named(Classifier):
        def forward(self, ids: Tensor) -> Any:
            return {"scores": super().forward(ids)}

    with pytest.raises(LossError, match="'scores'"):
        attempt(model=lambda: Named())


def test_a_shape_error_tells_the_shapes() -> None:
    with pytest.raises(JobError, match="RuntimeError") as caught:
        attempt(model=lambda: nn.Linear(4, 5), inputs={"input": "x"}, micro_batch=batch_of(x=torch.ones(5, 3)))
    assert "x (5, 3)" in caught.value.rule
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_in_eval_mode_is_explained_too() -> None:
    class FailsInEval(Classifier):
        def forward(self, ids: Tensor) -> Any:
            if not self.training:
                raise ValueError("no eval mode")
            return super().forward(ids)

    with pytest.raises(JobError, match="no eval mode"):
        attempt(model=lambda: FailsInEval())


def test_a_loss_without_a_graph_is_refused() -> None:
    with pytest.raises(LossError, match="does not depend on any trained parameter"):
        attempt(loss=with_total(lambda output, batch: output.detach().sum()))


def test_a_sparse_gradient_is_refused() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, CLASSES, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).mean(1)

    with pytest.raises(JobError, match="sparse"):
        attempt(model=lambda: Sparse())


# ── What a trial tells ──────────────────────────────────────────────────────────────────────────────────────────────


def test_flops_are_six_for_each_weight_and_token() -> None:
    """Two for the forward, four for the backward; the embedding, a look-up, has none."""
    for num_samples in (2, 5):
        assert attempt(batch_of(num_samples)).flops_per_sample == 6 * WIDTH * CLASSES * 7


def test_unused_parameters_are_listed() -> None:
    class Idle(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    assert attempt(model=lambda: Idle()).unused_parameters == ("idle.weight", "idle.bias")


Pair = namedtuple("Pair", ["logits", "other"])


@dataclass(frozen=True)
class Answer:
    logits: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: (logits, None),
        lambda logits: [logits],
        lambda logits: {"logits": logits},
        lambda logits: Pair(logits, 1),
        lambda logits: Answer(logits),
        lambda logits: {"nested": ({"deep": [logits]},)},
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_no_loss_sees_half_precision(wrap: Callable[[Tensor], Any], precision: Precision) -> None:
    """Whatever the model returns them in, logits reach the user's loss in float32."""

    class Wrapping(Classifier):
        def forward(self, ids: Tensor) -> Any:
            logits = super().forward(ids)
            assert logits.dtype != torch.float32
            return wrap(logits)

    seen = []

    def total(output: Any, batch: Any) -> Tensor:
        assert type(output) is type(wrap(torch.ones(1)))
        found = output
        while not isinstance(found, Tensor):
            if isinstance(found, dict):
                found = next(iter(found.values()))
            elif isinstance(found, (tuple, list)):
                found = found[0]
            else:
                found = found.logits
        seen.append(found.dtype)
        return found.sum()

    attempt(model=lambda: Wrapping(), loss=with_total(total, sized), precision=precision)
    assert set(seen) == {torch.float32}


def test_a_trial_leaves_no_gradient_and_the_modes() -> None:
    engine, job = build()
    engine.model.layer.eval()
    try_micro_batch(engine, batch_of(), job.input_keys)
    assert all(each.grad is None for each in engine.model.parameters())
    assert engine.model.training
    assert not engine.model.layer.training
