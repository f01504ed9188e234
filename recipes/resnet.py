"""A ResNet on scikit-learn's handwritten digits, or on a folder of images.

    trimaran train recipes/resnet.py --procs 2
    trimaran train recipes/resnet.py --procs 8 --images DIR --depth 50 --num-workers 6

On the digits (1,797 of 8 × 8 pixels) it takes a minute or two on two CPU cores, and ends with the accuracy on every
fifth digit of each class, unseen in training, beside that of a logistic regression. DIR holds train/CLASS/*.jpg and
val/CLASS/*.jpg as ImageNet does; see image_folder.py beside this file. Needs the extra `recipes`.
Shapes: B samples, C channels, H × W pixels.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import trimaran as tm
from image_folder import image_folder

MakeNorm = Callable[[int], nn.Module]

# ── The model ───────────────────────────────────────────────────────────────────────────────────────────────────────
# Children are named as in torchvision and timm, so that their pretrained weights fit as they are.


def convolve(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(channels_in: int, channels_out: int, stride: int, make_norm: MakeNorm) -> nn.Module:
    """The identity, or a 1 × 1 convolution where a block changes the shape."""
    if channels_in == channels_out and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolve(channels_in, channels_out, 1, stride), make_norm(channels_out))


class Basic(nn.Module):
    """Two 3 × 3 convolutions around a shortcut (He et al. 2015)."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = convolve(channels_in, width, 3, stride)
        self.bn1 = make_norm(width)
        self.conv2 = convolve(width, width, 3)
        self.bn2 = make_norm(width)
        self.downsample = shortcut(channels_in, width, stride, make_norm)
        nn.init.zeros_(self.bn2.weight)  # a block begins as its shortcut (Goyal et al. 2017)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        return F.relu(self.bn2(self.conv2(y_BCHW)) + self.downsample(x_BCHW))


class Bottleneck(nn.Module):
    """A 3 × 3 convolution between two of 1 × 1, the stride in the middle."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.conv1 = convolve(channels_in, width, 1)
        self.bn1 = make_norm(width)
        self.conv2 = convolve(width, width, 3, stride)
        self.bn2 = make_norm(width)
        self.conv3 = convolve(width, 4 * width, 1)
        self.bn3 = make_norm(4 * width)
        self.downsample = shortcut(channels_in, 4 * width, stride, make_norm)
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.bn2(self.conv2(y_BCHW)))
        return F.relu(self.bn3(self.conv3(y_BCHW)) + self.downsample(x_BCHW))


BLOCKS: dict[int, tuple[type[Basic] | type[Bottleneck], tuple[int, ...]]] = {
    18: (Basic, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class ResNet(nn.Module):
    """ResNet-18 or -50: images [B, C, H, W] to logits [B, classes].

    The ImageNet stem shrinks an image to a quarter of its sides at once; the small one keeps every pixel.
    """

    def __init__(
        self, num_classes: int, *, depth: int = 18, width: int = 64, channels: int = 3, stem: str, norm: str = "batch"
    ) -> None:
        super().__init__()
        # 32 groups at the usual width of 64 (Wu and He 2018); at a smaller one fewer, as large as those.
        num_groups = max(1, math.gcd(width, 64) // 2)
        make_norm: MakeNorm = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, num_groups)
        small = stem == "small"
        self.conv1 = convolve(channels, width, 3) if small else convolve(channels, width, 7, stride=2)
        self.bn1 = make_norm(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        block, lengths = BLOCKS[depth]
        channels = width
        for number, length in enumerate(lengths):
            strides = [1 if number == 0 else 2] + [1] * (length - 1)
            stage = nn.Sequential()
            for stride in strides:
                stage.append(block(channels, width * 2**number, stride, make_norm))
                channels = width * 2**number * block.expansion
            self.add_module(f"layer{number + 1}", stage)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        x_BCHW = self.maxpool(F.relu(self.bn1(self.conv1(image))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x_BCHW = stage(x_BCHW)
        return self.fc(x_BCHW.mean(dim=(2, 3)))


# ── The data ────────────────────────────────────────────────────────────────────────────────────────────────────────
# What is random in a sample is drawn from `random`, which the loader seeds for each (seed, epoch, sample).

Samples = Dataset[dict[str, Tensor | int]]


@dataclass(frozen=True)
class Task:
    """What is to be told apart, and what suits data of this kind."""

    train: Samples
    valid: Samples
    classes: Sequence[str]
    channels: int
    stem: Literal["small", "imagenet"]
    width: int
    global_batch: int
    epochs: float
    baselines: Mapping[str, Callable[[], Mapping[str, float]]] = field(default_factory=dict)


def load_task(images: Path | None, size: int | None, *, per_class: int | None = None, turned: bool = False) -> Task:
    """The folder `images`, its images `size` pixels wide and high (224), or without one the digits.

    per_class: train on the first so many of each class only. turned: the digits upside down. Raises JobError or
    DataError for what does not fit.
    """
    for name, value in (("size", size), ("per_class", per_class)):
        if value is not None and value < 1:
            raise tm.errors.JobError(f"{name}={value}.", "It counts pixels, or samples.", "Give 1 or more.")
    if images is not None:
        return images_task(images, 224 if size is None else size, per_class)
    if size is not None:
        raise tm.errors.JobError(
            f"size={size} without images.", "Digits are 8 pixels wide and high.", "Drop it, or give a folder of images."
        )
    return digits_task(per_class, turned)


class Digits(Samples):
    """Digits as images [1, 8, 8] from 0 to 1; where augmented, shifted by up to a pixel each way."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, augment: bool) -> None:
        self.images = torch.from_numpy(images).float()[:, None]
        self.labels = labels.tolist()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        image = self.images[index]
        if self.augment:
            top, left = random.randrange(3), random.randrange(3)
            image = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return {"image": image, "label": self.labels[index]}


def digits_task(per_class: int | None, turned: bool) -> Task:
    """scikit-learn's handwritten digits; every fifth of each class is held out, the same in every run."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16
    if turned:
        images = images[:, ::-1, ::-1].copy()
    indices_of = [np.flatnonzero(labels == label) for label in range(10)]
    held_out = np.concatenate([indices[4::5] for indices in indices_of])
    kept = np.concatenate([np.delete(indices, np.s_[4::5])[:per_class] for indices in indices_of])
    train = Digits(images[kept], labels[kept], augment=True)
    valid = Digits(images[held_out], labels[held_out], augment=False)

    def logistic_regression() -> dict[str, float]:
        fitted = LogisticRegression(max_iter=1000).fit(train.images.flatten(1), train.labels)
        return {"top-1": float(fitted.score(valid.images.flatten(1), valid.labels))}

    return Task(
        train,
        valid,
        classes="0123456789",
        channels=1,
        stem="small",
        width=16,
        global_batch=64,
        epochs=20,
        baselines={"logistic regression": logistic_regression},
    )


def images_task(folder: Path, size: int, per_class: int | None) -> Task:
    train, valid, classes = image_folder(folder, size=size, per_class=per_class)
    stem: Literal["small", "imagenet"] = "small" if size < 64 else "imagenet"
    return Task(train, valid, classes, channels=3, stem=stem, width=64, global_batch=256, epochs=90)


# ── The job ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def metrics_for(task: Task) -> dict[str, Any]:
    """Whether the right class is the first; and, of more than five, whether it is among the first five."""
    tops = (1, 5) if len(task.classes) > 5 else (1,)
    return {f"top-{top}": tm.losses.accuracy(top=top) for top in tops}


@torch.no_grad()
def describe_mistakes(model: nn.Module, task: Task, most: int = 1000) -> str:
    """Which classes are taken for which others, among validation samples spread evenly, `most` at most."""
    chosen = range(0, len(task.valid), math.ceil(len(task.valid) / most))
    like = next(model.parameters())
    mistakes: Counter[tuple[int, int]] = Counter()
    for start in range(0, len(chosen), 100):
        samples = [task.valid[index] for index in chosen[start : start + 100]]
        guesses = model(torch.stack([sample["image"] for sample in samples]).to(like)).argmax(dim=1).tolist()
        pairs = zip((sample["label"] for sample in samples), guesses, strict=True)
        mistakes.update((truth, guess) for truth, guess in pairs if truth != guess)
    names, lines = task.classes, [f"{mistakes.total()} of {len(chosen)} validation images wrong"]
    lines += [f"{names[truth]} taken for {names[guess]}: {n}" for (truth, guess), n in mistakes.most_common(8)]
    return "\n".join(lines)


def job(
    images: Path | None = None,
    depth: Literal[18, 50] = 18,
    norm: Literal["batch", "group"] = "batch",
    width: int | None = None,
    stem: Literal["small", "imagenet"] | None = None,
    size: int | None = None,
    epochs: float | None = None,
    lr: float = 0.1,
) -> tm.Job:
    """A ResNet on handwritten digits, or on a folder of images.

    images: the folder. size: the sides of what its images become (224). width: channels of the first stage (16 for
    digits, else 64). stem: small for images below 64 pixels, else imagenet.
    """
    task = load_task(images, size)
    return tm.Job(
        model=lambda: ResNet(
            len(task.classes),
            depth=depth,
            width=task.width if width is None else width,
            channels=task.channels,
            stem=stem or task.stem,
            norm=norm,
        ),
        data=task.train,
        valid=task.valid,
        inputs=("image",),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        metrics=metrics_for(task),
        optimizer=tm.optim.sgd(lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4, at_batch=task.global_batch),
        schedule=tm.optim.cosine(warmup=0.05, final=0.0),
        global_batch=task.global_batch,
        epochs=task.epochs if epochs is None else epochs,
        sample=partial(describe_mistakes, task=task),
        baselines=task.baselines,
    )
