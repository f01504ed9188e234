"""An ImageNet-style folder of images as training and validation data; decoded by Pillow, augmented, normalised.

DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg alone: then every tenth image of each class, by name, is
held out. What is random in a sample is drawn from `random`, which the loader seeds for each (seed, epoch, sample).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

import trimaran as tm

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
# Of ImageNet's training images, by channel; pixels from 0 to 1.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
Box = tuple[float, float, float, float]


def random_box(width: int, height: int) -> Box:
    """A part of the image: 8 to 100 % of its area, sides from 3:4 to 4:3 (Szegedy et al. 2014)."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(-math.log(4 / 3), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return central_box(width, height, share=1)


def central_box(width: int, height: int, share: float = 0.875) -> Box:
    """The square in the middle; its side is `share` of the image's shorter one (224 pixels of 256)."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class Images(Dataset[dict[str, Tensor | int]]):
    """Image files as tensors [3, size, size]: where augmented, a random part, mirrored or not; else the middle."""

    def __init__(
        self, files_of: Mapping[str, Sequence[Path]], classes: Sequence[str], size: int, augment: bool
    ) -> None:
        self.files = [(file, label) for label, name in enumerate(classes) for file in files_of.get(name, ())]
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        file, label = self.files[index]
        try:
            with Image.open(file) as image:
                box = random_box(*image.size) if self.augment else central_box(*image.size)
                part = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
            raise tm.errors.DataError(
                f"{file} cannot be read: {problem}.", "Each file is a whole image.", "Repair it, or take it away."
            ) from problem
        if self.augment and random.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels_HWC = (np.asarray(part, np.float32) / 255 - MEAN) / STD
        return {"image": torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous(), "label": label}


def image_folder(folder: Path, *, size: int, per_class: int | None = None) -> tuple[Images, Images, list[str]]:
    """Training data (the first `per_class` images of each class, or all), validation data, and the classes' names.

    Raises DataError for a folder from which nothing can be learnt, or judged.
    """
    if (folder / "train").is_dir() != (folder / "val").is_dir():
        raise folder_error(f"{folder} has one of train/ and val/, and not the other.")
    if (folder / "train").is_dir():
        train, valid = find_images(folder / "train"), find_images(folder / "val")
    else:
        found = find_images(folder)
        train = {name: [file for i, file in enumerate(files) if i % 10 != 9] for name, files in found.items()}
        valid = {name: files[9::10] for name, files in found.items()}
    if len(train) < 2 or not any(valid.values()):
        held_out = sum(map(len, valid.values()))
        raise folder_error(f"{folder}: classes: {len(train)}; images for validation: {held_out}.")
    if unknown := sorted(valid.keys() - train.keys()):
        raise folder_error(f"{folder} has the class {unknown[0]} for validation only.")
    classes = sorted(train)
    few = {name: files[:per_class] for name, files in train.items()}
    return Images(few, classes, size, augment=True), Images(valid, classes, size, augment=False), classes


def find_images(folder: Path) -> dict[str, list[Path]]:
    """Class -> its files by name, those of folders inside included."""
    folders = [path for path in folder.glob("[!.]*") if path.is_dir()]
    found = {path.name: sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES) for path in folders}
    if not found:
        raise folder_error(f"{folder} has no folder in it." if folder.is_dir() else f"{folder} is no folder.")
    if empty := sorted(name for name, files in found.items() if not files):
        raise folder_error(f"{folder / empty[0]} has no image in it ({', '.join(SUFFIXES)}).")
    return found


def folder_error(value: str) -> tm.errors.DataError:
    return tm.errors.DataError(
        value,
        "Two classes or more lie in DIR/train/CLASS and DIR/val/CLASS, or in DIR/CLASS with ten images in some class.",
        "Check the path, and complete the folder.",
    )
