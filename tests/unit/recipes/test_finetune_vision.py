"""Fine-tuning in two stages: what is frozen does not move and costs no state, and the second begins at the first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trimaran as tm
from trimaran.checkpoint import load_weights, save_weights
from trimaran.data import Order, build_loader
from trimaran.engine import Engine, build_engine
from trimaran.errors import CheckpointError, JobError
from trimaran.world.groups import open_world

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))  # as the command does for a job file's folder

import finetune_vision
import resnet

WIDTH = 8


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Weights of a network for seven classes, its running statistics and gains not those of a new one."""
    torch.manual_seed(1)
    model = resnet.ResNet(7, width=WIDTH, channels=1, stem="small")
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var", "bn2.weight")):
            tensor.uniform_(0.5, 1.5)
    save_weights(model, tmp_path / "pretrained.safetensors")
    return tmp_path / "pretrained.safetensors"


def build(job: tm.Job) -> Engine:
    layout = tm.Layout().resolve(world_size=1, global_batch=job.global_batch)
    weights = job.weights_in
    load = None if weights is None else lambda model: load_weights(model, weights)
    return build_engine(job, layout, open_world(None, layout, device="cpu"), load_weights=load)


def train(engine: Engine, job: tm.Job, steps: int = 3) -> None:
    def loader(source: tm.job.Source, order: Order, total: int) -> object:
        return build_loader(
            source,
            collate=None,
            order=order,
            global_batch=job.global_batch,
            total_samples=total,
            dp=1,
            dp_rank=0,
            micro_batch=job.global_batch,
        )

    for at, batch in enumerate(loader(job.data, Order(len(job.data)), steps * job.global_batch)):
        engine.step(batch)
        if at == 0:
            engine.evaluate(loader(job.valid, Order(len(job.valid), shuffle=False), 40))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_frozen_backbone_does_not_move_and_has_no_optimizer_state(pretrained: Path, norm: str) -> None:
    if norm == "group":
        torch.manual_seed(1)
        save_weights(resnet.ResNet(7, width=WIDTH, channels=1, stem="small", norm=norm), pretrained)
    job = finetune_vision.job(weights=pretrained, width=WIDTH, norm=norm)
    engine = build(job)
    before = state(engine.model)
    train(engine, job)
    assert engine.model.training
    assert changed(engine.model, before) == {"fc.weight", "fc.bias"}  # running statistics included
    head = set(engine.model.fc.parameters())
    assert {each for group in engine.optimizer.param_groups for each in group["params"]} == head
    assert set(engine.optimizer.state) <= head
    assert all(each.grad is None for each in engine.model.parameters() if each not in head)


def test_a_frozen_norm_uses_its_statistics_in_training(pretrained: Path) -> None:
    """A sample's output does not depend on the others of its batch."""
    engine = build(finetune_vision.job(weights=pretrained, width=WIDTH))
    images = torch.rand(6, 1, 8, 8)
    assert engine.model.training
    torch.testing.assert_close(engine.model(images)[:2], engine.model(images[:2]))


def test_the_head_stage_takes_all_but_the_head_from_the_file(pretrained: Path) -> None:
    engine = build(finetune_vision.job(weights=pretrained, width=WIDTH))
    source = resnet.ResNet(7, width=WIDTH, channels=1, stem="small")
    load_weights(source, tm.Weights(pretrained))
    theirs, ours = source.state_dict(), engine.model.state_dict()
    assert [name for name in ours if not name.startswith("fc.") and not torch.equal(ours[name], theirs[name])] == []
    assert ours["fc.weight"].shape == (10, 8 * WIDTH)


def test_the_whole_is_trained_from_where_the_head_ended(pretrained: Path, tmp_path: Path) -> None:
    first_job = finetune_vision.job(weights=pretrained, width=WIDTH)
    first = build(first_job)
    train(first, first_job, steps=1)
    save_weights(first.model, tmp_path / "head.safetensors")
    second_job = finetune_vision.job(weights=tmp_path / "head.safetensors", stage="all", width=WIDTH)
    second = build(second_job)
    assert changed(second.model, state(first.model)) == set()
    assert all(parameter.requires_grad for parameter in second.model.parameters())
    assert all(module.training for module in second.model.modules())
    train(second, second_job, steps=1)
    assert changed(second.model, state(first.model)) == set(first.model.state_dict())
    assert second_job.optimizer.rate(32).value < first_job.optimizer.rate(32).value


def test_a_head_of_another_task_is_refused_where_all_is_trained(pretrained: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        build(finetune_vision.job(weights=pretrained, stage="all", width=WIDTH))
    assert "fc.weight: 7×64 in the file, 10×64 in the model" in caught.value.value


def test_stage_and_weights_fit(pretrained: Path) -> None:
    assert finetune_vision.job(stage="scratch", width=WIDTH).weights is None
    for arguments in ({"stage": "head"}, {"stage": "all"}, {"stage": "scratch", "weights": pretrained}):
        with pytest.raises(JobError, match="weights"):
            finetune_vision.job(**arguments)


def test_few_samples_of_each_class_are_trained_on() -> None:
    job = finetune_vision.job(stage="scratch", per_class=4)
    assert sorted(job.data.labels) == [digit for digit in range(10) for _ in range(4)]
