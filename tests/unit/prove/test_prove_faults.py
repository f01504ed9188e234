"""Each planted fault is named by its own check, and by no other."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from prove_jobs import CLASSES, FEATURES, Net, Points, check, failures, job
from torch import Tensor, nn

import trimaran as tm
from trimaran.prove import CHECKS

WIDTH = 24


class TooSure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight.data *= 40


class Leaky(Net):
    """Finds the label among its inputs."""

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return super().forward(x) + 8 * F.one_hot(label, CLASSES)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).detach())


class RootOfZero(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h + (0 * h).sqrt()


class BatchMean(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h + h.mean(dim=0)


class ModuleMean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h + h.mean(dim=0)


class InnerMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mix = ModuleMean()

    def middle(self, h: Tensor) -> Tensor:
        return self.mix(h)


class WrongAxis(Net):
    """Attention that takes the batch for the sequence, in a branch that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH // 3, 2, batch_first=False)
        nn.init.zeros_(self.attention.out_proj.weight)

    def middle(self, h: Tensor) -> Tensor:
        h_BTD = h.view(len(h), 3, -1)
        return (h_BTD + self.attention(h_BTD, h_BTD, h_BTD)[0]).flatten(1)


class CountsEvaluations(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def middle(self, h: Tensor) -> Tensor:
        if not self.training:
            self.seen += 1
        return h


class AlwaysDropout(Net):
    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.1)


class NumpyNoise(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h if self.training else h + 0 * float(np.random.rand())


class Attribute(Net):
    """A running scale that lies outside of buffers."""

    scale = 1.0

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            self.scale *= 0.999
        return h * self.scale


class UnsavedBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def middle(self, h: Tensor) -> Tensor:
        if self.training:
            self.scale *= 0.999
        return h


class ConstructorNoise(Net):
    def __init__(self) -> None:
        super().__init__()
        noise = np.random.default_rng().normal(size=(CLASSES, WIDTH))
        self.last.weight.data += 0.01 * torch.from_numpy(noise).float()


class ForwardNoise(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def middle(self, h: Tensor) -> Tensor:
        return h + 0.01 * torch.rand(h.shape, generator=self.generator) if self.training else h


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)


class WrongShape(Net):
    def middle(self, h: Tensor) -> Tensor:
        return h[:, 1:]


def random_label(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**sample, "label": torch.randint(CLASSES, ())}


def slow(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    time.sleep(3e-3)
    return sample


def unseeded(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**sample, "x": sample["x"] + 0.01 * float(np.random.default_rng().normal())}


def missing(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    raise KeyError("pixels")


def mean_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["label"])


MEAN = tm.losses.custom(total=mean_loss, weight=lambda batch: len(batch["label"]))

FAULTS: list[tuple[str, tm.Job, str]] = [
    ("runs", job(WrongShape), "mat1 and mat2"),
    ("runs", job(data=Points(missing)), "pixels"),
    ("first_loss", job(TooSure), "chance gives 1.386"),
    ("first_loss", job(Leaky, inputs=("x", "label")), "chance gives 1.386"),
    ("gradients", job(Unused), "spare.weight, spare.bias"),
    ("gradients", job(Detached), "first.weight, first.bias"),
    ("gradients", job(RootOfZero), "not finite in first.weight"),
    ("independent_samples", job(BatchMean), "the model itself (BatchMean)"),
    ("independent_samples", job(InnerMean), "mix (ModuleMean)"),
    ("independent_samples", job(WrongAxis), "attention (MultiheadAttention)"),
    ("loss_sum", job(loss=MEAN), "returns a mean"),
    ("one_batch_overfits", job(optimizer=tm.optim.adamw(lr=1e-9)), "at rate 1e-9"),
    ("one_batch_overfits", job(optimizer=tm.optim.sgd(lr=1e6)), "at rate 1e6"),
    ("loss_falls", job(data=Points(random_label)), "in 40 steps"),
    ("evaluation_keeps_state", job(CountsEvaluations), "seen"),
    ("evaluation_keeps_randomness", job(AlwaysDropout), "generator of torch"),
    ("evaluation_keeps_randomness", job(NumpyNoise), "generator of numpy"),
    ("data_loading", job(data=Points(slow), global_batch=8, steps=1_000_000), "would wait"),
    ("save_and_load", job(Attribute), "before and"),
    ("save_and_load", job(UnsavedBuffer), "nobody saves: scale"),
    ("same_seed", job(ConstructorNoise), "constructor gives other first values to last.weight"),
    ("same_seed", job(data=Points(unseeded)), "data gives other x"),
    ("same_seed", job(ForwardNoise, global_batch=8), "Forward or backward draws from elsewhere"),
    ("batch_statistics", job(Normed, global_batch=8), "norm (BatchNorm1d): statistics over 4 samples"),
]


@pytest.mark.parametrize(
    ("name", "faulty", "told"), FAULTS, ids=[f"{number}-{name}" for number, (name, _, _) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_named_by_its_own_check_alone(name: str, faulty: tm.Job, told: str) -> None:
    found = check(faulty)
    assert failures(found) == [name]
    assert told in found[name].value
    assert found[name].rule
    assert found[name].remedy
    assert list(found) == list(CHECKS)


def test_every_check_has_a_planted_fault() -> None:
    assert {name for name, _, _ in FAULTS} == set(CHECKS)


def test_too_few_workers_are_counted() -> None:
    found = check(job(data=Points(slow), global_batch=8, steps=1_000_000))["data_loading"]
    assert "--num-workers" in found.remedy
    enough = check(job(data=Points(slow), global_batch=8, steps=1_000_000), num_workers=1000)["data_loading"]
    assert enough.status == "passed"


def test_a_rate_that_is_ten_times_too_high_is_told() -> None:
    found = check(job(data=Points(lambda sample: {**sample, "x": 3 * sample["x"]}), optimizer=tm.optim.sgd(lr=30.0)))
    assert failures(found) == ["one_batch_overfits"]
    assert "falls at a tenth of that rate" in found["one_batch_overfits"].value


def test_the_inputs_have_as_many_features_as_the_job_says() -> None:
    assert Points()[0]["x"].shape == (FEATURES,)
