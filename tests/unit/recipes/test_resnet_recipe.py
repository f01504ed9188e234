"""The image recipe: the published networks, data that is split and augmented the same everywhere, clear refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from trimaran.batch import RankBatch
from trimaran.data import Order, build_loader
from trimaran.engine import Engine, build_engine
from trimaran.errors import DataError, JobError
from trimaran.world.groups import join_default_group, open_world

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))  # as the command does for a job file's folder

import image_folder
import resnet


def build(job: tm.Job, micro_batch: int | None = None) -> Engine:
    layout = tm.Layout(micro_batch=micro_batch).resolve(world_size=1, global_batch=job.global_batch)
    return build_engine(job, layout, open_world(None, layout, device="cpu"))


def batches(job: tm.Job, *, micro_batch: int, dp: int = 1, dp_rank: int = 0) -> Iterator[RankBatch]:
    return iter(
        build_loader(
            job.data,
            collate=None,
            order=Order(len(job.data), job.seed),
            global_batch=job.global_batch,
            total_samples=job.total_samples,
            dp=dp,
            dp_rank=dp_rank,
            micro_batch=micro_batch,
        )
    )


# ── The model ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("depth", "published"), [(18, 11_689_512), (50, 25_557_032)])
def test_the_networks_have_the_published_size(depth: int, published: int) -> None:
    with torch.device("meta"):
        model = resnet.ResNet(1000, depth=depth, stem="imagenet")
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize(("depth", "last_width"), [(18, 64), (50, 256)])
@pytest.mark.parametrize(("stem", "size", "sides"), [("small", 8, (8, 4, 2, 1)), ("imagenet", 64, (16, 8, 4, 2))])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_each_stage_has_its_resolution(
    depth: int, last_width: int, stem: str, size: int, sides: tuple[int, ...], norm: str
) -> None:
    model = resnet.ResNet(7, depth=depth, width=8, channels=1, stem=stem, norm=norm)
    shapes: list[torch.Size] = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    assert model(torch.randn(3, 1, size, size)).shape == (3, 7)
    assert [shape[-1] for shape in shapes] == list(sides)
    assert shapes[-1][1] == last_width
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == (norm == "batch")


def test_names_are_those_that_pretrained_weights_have() -> None:
    names = resnet.ResNet(3, depth=50, width=4, stem="imagenet").state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.downsample.0.weight", "layer1.0.downsample.1.bias"} <= names
    assert {"layer3.5.conv3.weight", "layer4.2.bn3.num_batches_tracked", "fc.weight", "fc.bias"} <= names
    assert "layer1.1.downsample.0.weight" not in names


@pytest.mark.parametrize("depth", [18, 50])
def test_a_block_begins_as_its_shortcut_and_every_parameter_learns(depth: int) -> None:
    torch.manual_seed(0)
    model = resnet.ResNet(5, depth=depth, width=8, channels=1, stem="small")
    block = model.layer2[1]
    x = torch.rand(4, block.conv1.in_channels, 4, 4)
    assert torch.equal(block(x), x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # gains of zero keep a gradient from the branch in the first step
        optimizer.zero_grad()
        model(torch.rand(4, 1, 16, 16)).logsumexp(1).sum().backward()
        optimizer.step()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


@pytest.mark.parametrize(("width", "groups"), [(64, 32), (128, 32), (80, 8), (16, 8), (9, 1), (1, 1)])
def test_group_norm_divides_any_width(width: int, groups: int) -> None:
    model = resnet.ResNet(2, width=width, channels=1, stem="small", norm="group")
    assert {module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)} == {groups}


def test_no_group_of_the_norm_is_small() -> None:
    """Groups of four values (32 groups at 1 × 1 pixels) grew rounding from 1e-7 to 1e-3 of the loss in twelve steps."""
    job = resnet.job(norm="group")
    model = job.model()
    values: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            module.register_forward_hook(
                lambda module, args, output: values.append(output[0].numel() // module.num_groups)
            )
    model(torch.rand(1, 1, 8, 8))
    assert len(values) == 20
    assert min(values) >= 16


def losses_of_four_steps() -> list[float]:
    """On this rank of as many as there are: the global batch's losses, 23 samples that neither 2 nor 3 divides."""
    torch.manual_seed(0)
    digits = resnet.Digits(torch.rand(50, 8, 8).numpy(), np.arange(50) % 10, augment=True)
    job = tm.Job(
        model=lambda: resnet.ResNet(10, width=8, channels=1, stem="small", norm="group"),
        data=digits,
        inputs=("image",),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        optimizer=tm.optim.sgd(lr=0.1, momentum=0.9, nesterov=True),
        global_batch=23,
        steps=4,
    )
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    layout = tm.Layout().resolve(world_size=world_size, global_batch=job.global_batch)
    world = (
        join_default_group(layout, torch.device("cpu")) if world_size > 1 else open_world(None, layout, device="cpu")
    )
    engine = build_engine(job, layout, world)
    shares = batches(job, micro_batch=layout.micro_batch, dp=layout.dp, dp_rank=world.place.dp)
    return [float(engine.step(batch).loss) for batch in shares]


def test_one_two_and_three_processes_train_alike(pool: Pool) -> None:
    one = pool.run(losses_of_four_steps, 1)[0]
    assert len(set(one)) == 4
    for world_size in (2, 3):
        for losses in pool.run(losses_of_four_steps, world_size):
            np.testing.assert_allclose(losses, one, rtol=1e-5)


# ── The digits ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_fifth_digit_of_each_class_is_held_out() -> None:
    task = resnet.digits_task(None, turned=False)
    assert (len(task.train), len(task.valid)) == (1442, 355)
    rows = [{image.numpy().tobytes() for image in part.images} for part in (task.train, task.valid)]
    assert rows[0].isdisjoint(rows[1])
    counts = [np.bincount(part.labels, minlength=10) for part in (task.train, task.valid)]
    assert all(counts[1] == (counts[0] + counts[1]) // 5)


def test_few_digits_of_each_class_and_upside_down() -> None:
    whole, few = resnet.digits_task(None, turned=False), resnet.digits_task(3, turned=True)
    assert np.bincount(few.train.labels).tolist() == [3] * 10
    assert len(few.valid) == len(whole.valid)
    assert torch.equal(few.valid.images, torch.rot90(whole.valid.images, 2, (2, 3)))


def test_a_shift_moves_a_digit_by_a_pixel_at_most() -> None:
    digits = resnet.Digits(np.pad(np.ones((1, 1, 1)), ((0, 0), (3, 4), (4, 3))), np.array([7]), augment=True)
    samples = [digits[0] for _ in range(200)]
    places = {tuple(sample["image"][0].nonzero()[0].tolist()) for sample in samples}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert {sample["label"] for sample in samples} == {7}
    plain = resnet.Digits(digits.images[:, 0].numpy(), np.array([7]), augment=False)
    assert torch.equal(plain[0]["image"], plain.images[0])


def test_the_baseline_is_judged_on_the_same_digits() -> None:
    task = resnet.digits_task(2, turned=False)
    (figures,) = [baseline() for baseline in task.baselines.values()]
    assert figures.keys() <= resnet.metrics_for(task).keys()
    assert 0.5 < figures["top-1"] < 0.9


def test_the_mistakes_are_counted() -> None:
    task = resnet.digits_task(1, turned=False)

    class AlwaysThree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.eye(10, dtype=torch.float64)[3])

        def forward(self, image: Tensor) -> Tensor:
            assert image.dtype == torch.float64
            return self.bias.expand(len(image), 10)

    counts = np.bincount(task.valid.labels)
    lines = resnet.describe_mistakes(AlwaysThree(), task).splitlines()
    assert lines[0] == f"{355 - counts[3]} of 355 validation images wrong"
    assert f"5 taken for 3: {counts[5]}" in lines
    assert (
        resnet.describe_mistakes(AlwaysThree(), task, most=100)
        .splitlines()[0]
        .endswith("of 89 validation images wrong")
    )


# ── A folder of images ──────────────────────────────────────────────────────────────────────────────────────────────


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for at, (part, count) in enumerate([("train", 4), ("val", 2)]):
        for name in ("cat", "dog", "eel"):
            for number in range(count):
                write_image(tmp_path / part / name / f"{number}.png", seed=at * 100 + number, size=(40, 30 + number))
    write_image(tmp_path / "train" / "cat" / "more" / "grey.JPG", mode="L")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def test_a_folder_is_learnt_from(folder: Path) -> None:
    job = resnet.job(images=folder, size=32, width=4, epochs=1).with_overrides(steps=2, seed=None, global_batch=5)
    assert (len(job.data), len(job.valid)) == (13, 6)
    assert job.metrics.keys() == {"top-1"}
    engine = build(job)
    before = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
    for batch in batches(job, micro_batch=5):
        assert batch.micro_batches[0].tensors["image"].shape == (5, 3, 32, 32)
        assert torch.isfinite(torch.tensor(engine.step(batch).loss))
    changed = [name for name, each in engine.model.named_parameters() if not torch.equal(each, before[name])]
    assert {"conv1.weight", "fc.weight"} <= set(changed)


def test_labels_are_classes_in_alphabetical_order(folder: Path) -> None:
    train, valid, classes = image_folder.image_folder(folder, size=8)
    assert classes == ["cat", "dog", "eel"]
    assert [valid[index]["label"] for index in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [file.parts[-2:] for file, label in train.files if label == 1] == [("dog", f"{n}.png") for n in range(4)]
    few, _, _ = image_folder.image_folder(folder, size=8, per_class=1)
    assert [label for _, label in few.files] == [0, 1, 2]


def test_without_val_every_tenth_image_is_held_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(21):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number:02}.jpg").touch()
    train, valid, _ = image_folder.image_folder(tmp_path, size=8)
    assert [file.stem for file, _ in valid.files] == ["09", "19"] * 2
    assert len(train) == 38


def test_validation_shows_the_middle_normalised(tmp_path: Path) -> None:
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[2:62, 18:78] = (255, 0, 0)  # the middle is 56 of the shorter side's 64, and interpolation sees a bit more
    Image.fromarray(pixels).save(tmp_path / "a.png")
    images = image_folder.Images({"a": [tmp_path / "a.png"]}, ["a"], size=16, augment=False)
    red, green, blue = images[0]["image"]
    torch.testing.assert_close(red, torch.full((16, 16), (1 - 0.485) / 0.229))
    torch.testing.assert_close(green, torch.full((16, 16), -0.456 / 0.224))
    torch.testing.assert_close(blue, torch.full((16, 16), -0.406 / 0.225))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (10, 1000), (1, 1)])
def test_a_random_part_lies_inside_and_varies(width: int, height: int) -> None:
    boxes = [image_folder.random_box(width, height) for _ in range(300)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width + 1e-9
        assert 0 <= top < bottom <= height + 1e-9
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9
    if width == 500:
        shares = [(right - left) * (bottom - top) / (width * height) for left, top, right, bottom in boxes]
        assert 0.08 <= min(shares) < 0.15
        assert 0.8 < max(shares) <= 1


# ── Augmentation is a function of (seed, epoch, sample) ─────────────────────────────────────────────────────────────


def samples_seen(job: tm.Job, micro_batch: int, dp: int) -> dict[int, Tensor]:
    """Position of the run -> image, over all ranks."""
    found: dict[int, Tensor] = {}
    for rank in range(dp):
        for batch in batches(job, micro_batch=micro_batch, dp=dp, dp_rank=rank):
            for each in batch.micro_batches:
                if not each.weightless:
                    found |= {each.position + at: row for at, row in enumerate(each.tensors["image"])}
    return found


@pytest.mark.parametrize("data", ["digits", "images"])
def test_augmentation_does_not_depend_on_the_layout(folder: Path, data: str) -> None:
    if data == "digits":
        few = resnet.digits_task(1, turned=False).train
        job = replace(resnet.job(), data=few).with_overrides(steps=6, seed=None, global_batch=7)
    else:
        job = resnet.job(images=folder, size=16).with_overrides(steps=6, seed=None, global_batch=7)
    one = samples_seen(job, micro_batch=7, dp=1)
    other = samples_seen(job, micro_batch=2, dp=2)
    assert one.keys() == other.keys() == set(range(job.total_samples))
    assert all(torch.equal(one[position], other[position]) for position in one)
    epochs, ids = Order(len(job.data), job.seed).at(np.arange(job.total_samples))
    twice = {int(i): [one[at] for at in np.flatnonzero(ids == i)] for i in np.unique(ids)}
    assert any(not torch.equal(seen[0], seen[1]) for seen in twice.values())  # another epoch, another draw
    assert epochs.max() >= 1


# ── What is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((DataError, JobError)) as caught:
        call(*args, **kwargs)
    return caught.value.value


def test_folders_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        return refusal(image_folder.image_folder, path, size=8)

    assert refused(folder / "nowhere").endswith("nowhere is no folder.")
    assert refused(folder / "train" / "dog").endswith("dog has no folder in it.")
    (folder / "train" / "fox").mkdir()
    assert "fox has no image in it" in refused(folder)
    (folder / "train" / "fox").rmdir()
    write_image(folder / "val" / "gnu" / "1.png")
    assert refused(folder).endswith("has the class gnu for validation only.")
    (folder / "val").rename(folder / "validation")
    assert "one of train/ and val/" in refused(folder)
    assert "images for validation: 0" in refused(folder / "validation")
    write_image(tmp_path / "alone" / "a" / "1.png")
    assert "classes: 1;" in refused(tmp_path / "alone")


@pytest.mark.parametrize("content", [b"", b"no image", "cut"])
def test_an_image_that_cannot_be_read_is_named_with_its_sample(folder: Path, content: bytes | str) -> None:
    file = folder / "train" / "eel" / "2.png"
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:200])
    job = resnet.job(images=folder, size=16).with_overrides(steps=3, seed=None, global_batch=13)
    told = refusal(lambda: list(batches(job, micro_batch=13)))
    assert str(file) in told
    assert f"Sample {[each for each, _ in job.data.files].index(file)} " in told


def test_numbers_that_cannot_be_meant_are_refused(folder: Path) -> None:
    assert refusal(resnet.job, size=32) == "size=32 without images."
    assert refusal(resnet.job, images=folder, size=0) == "size=0."
    assert refusal(resnet.load_task, None, None, per_class=-1) == "per_class=-1."
    assert refusal(resnet.job, epochs=0) == "epochs=0."
