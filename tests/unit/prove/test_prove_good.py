"""Jobs in which nothing is wrong pass, unusual ones too; slow ones end."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from prove_jobs import CLASSES, FEATURES, LIMITS, Net, Points, check, failures, job
from safetensors.torch import save_file
from torch import Tensor, nn

import trimaran as tm
from trimaran.prove import CHECKS, Limits


def test_a_good_job_passes_every_check() -> None:
    found = check(job())
    assert list(found) == list(CHECKS)
    assert {finding.status for finding in found.values()} == {"passed"}


class LowRank(nn.Module):
    """x W + x A B, W frozen and B zero at first: A's first gradient is exactly zero."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Adapted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = LowRank(FEATURES, 24)
        self.last = LowRank(24, CLASSES)


def test_adapters_that_start_at_zero_and_frozen_weights_pass() -> None:
    assert failures(check(job(Adapted))) == []


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.dropout = nn.Dropout(0.1)

    def middle(self, h: Tensor) -> Tensor:
        return self.dropout(self.norm(h))


def test_batch_norm_over_enough_samples_passes_with_a_note() -> None:
    found = check(job(Normed, global_batch=64))
    assert failures(found) == []
    assert "norm (BatchNorm1d): statistics over 32 samples" in found["batch_statistics"].value


class Centred(Net):
    """Statistics over the batch in training without a BatchNorm."""

    def middle(self, h: Tensor) -> Tensor:
        return h - h.mean(dim=0) if self.training else h


def test_statistics_of_a_module_of_ones_own_are_named() -> None:
    found = check(job(Centred, global_batch=8))
    assert failures(found) == ["batch_statistics"]
    assert "the model itself (Centred)" in found["batch_statistics"].value


def test_pretrained_weights_have_no_first_loss_of_chance(tmp_path: Path) -> None:
    model = Net()
    model.last.weight.data *= 40
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = check(job(weights=tmp_path / "model.safetensors"))
    assert failures(found) == []
    assert found["first_loss"].status == "skipped"
    assert found["first_loss"].value.startswith("pretrained")


def test_a_first_loss_without_a_chance_is_skipped() -> None:
    targets = Points(lambda sample: {"x": sample["x"], "target": sample["x"][:CLASSES]})
    found = check(job(data=targets, loss=tm.losses.mse(), metrics={}))
    assert failures(found) == []
    assert found["first_loss"].status == "skipped"


def test_smoothed_labels_have_a_smallest_loss_above_half_of_the_first() -> None:
    found = check(job(loss=tm.losses.cross_entropy(label_smoothing=0.5)))
    assert failures(found) == []
    assert found["first_loss"].status == found["one_batch_overfits"].status == "passed"


def test_a_loss_of_ones_own_may_have_a_large_smallest_value() -> None:
    def total(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, batch["label"], reduction="sum") + 2.0 * len(output)

    own = tm.losses.custom(total=total, weight=lambda batch: len(batch["label"]))
    assert failures(check(job(loss=own, metrics={}))) == []


def test_a_bias_at_the_frequencies_of_the_classes_passes() -> None:
    class Rare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last.bias.data = torch.tensor([8.0, 0.0, 0.0, 0.0])

    class Mostly(Points):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            sample = super().__getitem__(index)
            return {**sample, "label": sample["label"] * (index % 32 == 0)}

    assert check(job(Rare, data=Mostly()))["first_loss"].status == "passed"


def test_a_global_batch_of_one_sample_is_checked() -> None:
    found = check(job(global_batch=1, optimizer=tm.optim.adamw(lr=3e-3)))
    assert failures(found) == []
    assert found["independent_samples"].status == "skipped"


class Slow(Net):
    num_forwards = 0

    def middle(self, h: Tensor) -> Tensor:
        Slow.num_forwards += 1
        time.sleep(0.02)
        return h


def test_a_slow_model_is_bounded_and_not_blamed() -> None:
    found = check(
        job(Slow, optimizer=tm.optim.adamw(lr=1e-4)), limits=Limits(training_seconds=0.1, loading_seconds=0.1)
    )
    assert failures(found) == []
    assert found["one_batch_overfits"].status == "skipped"
    assert "too slow to tell" in found["one_batch_overfits"].value
    assert Slow.num_forwards < 100  # 200 steps to overfit and 40 of four forwards would be 360


def test_what_no_time_is_left_for_is_skipped() -> None:
    found = check(job(), limits=Limits(total_seconds=0.0))
    assert failures(found) == []
    assert found["gradients"].status == found["same_seed"].status == "skipped"
    assert found["first_loss"].status == "passed"
    assert LIMITS.total_seconds > 0


def test_a_metric_that_raises_is_a_finding() -> None:
    broken = tm.losses.custom(total=lambda output, batch: output.nothing, weight=lambda batch: 1)
    found = check(job(metrics={"broken": broken}))
    assert failures(found)[0] == "evaluation_keeps_state"
    assert "AttributeError" in found["evaluation_keeps_state"].value
    assert "test_prove_good.py" in found["evaluation_keeps_state"].value
    assert found["loss_falls"].status == "passed"
