"""What the contestants train: three recipes' models on batches cut beforehand, the same for all.

Optimizers are the recipes'; their schedules are left out, and all clip. Shapes: B samples, T positions, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import text_classifier
import trimaran as tm
from gpt import GPT
from resnet import ResNet

SEED = 0
CLIP = 1.0
NUM_BATCHES = 8

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, made for samples; its loss twice, as Trimaran takes it and as a mean by hand; its optimizer twice.

    `draw` makes the samples. `optimizer` has the settings of the equal comparison, `readme_optimizer` is the one line
    that a README has.
    """

    model: Callable[[Batch], nn.Module]
    inputs: tuple[str, ...]
    loss: Any
    mean_loss: Callable[[Tensor, Batch], Tensor]
    optimizer: Any
    readme_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    global_batch: int
    draw: Callable[[int], dict[str, Tensor]]


def next_token_mean(logits_BTV: Tensor, batch: Batch) -> Tensor:
    labels_BT = F.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)  # the logits then need no copy
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def smoothed_mean(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch["label"], label_smoothing=0.1)


def draw_windows(num_samples: int) -> dict[str, Tensor]:
    """Windows of the standard library's source, spread evenly over it."""
    source = tm.data.python_source(seq_len=128)
    stride = len(source) // num_samples
    return {"input_ids": torch.stack([source[index * stride]["input_ids"] for index in range(num_samples)])}


def draw_digits(num_samples: int) -> dict[str, Tensor]:
    """The first handwritten digits of scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images[:num_samples]).float().view(-1, 1, 8, 8) / 16
    return {"image": images, "label": torch.from_numpy(labels[:num_samples])}


def draw_snippets(num_samples: int) -> dict[str, Tensor]:
    """Snippets of the standard library in pieces, padded to the longest, for which package they come from."""
    job = text_classifier.job()
    torch.manual_seed(SEED)
    random.seed(SEED)
    indices = torch.randperm(len(job.data))[:num_samples].tolist()
    return job.collate([job.data[index] for index in indices])


def build_classifier(samples: Batch) -> nn.Module:
    """With as many pieces and classes as the samples have."""
    num_pieces, num_classes = (int(samples[key].max()) + 1 for key in ("pieces", "label"))
    return text_classifier.Classifier(num_pieces, num_classes, width=96, depth=1, heads=4, longest=160)


WORKLOADS = {
    "gpt": Workload(
        model=lambda _: GPT(width=128, depth=2, heads=4, seq_len=128),
        inputs=("input_ids",),
        loss=tm.losses.next_token(),
        mean_loss=next_token_mean,
        optimizer=tm.optim.adamw(
            lr=2e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            groups={"embed.*": {"lr_scale": 4.0, "weight_decay": 0.0}},
        ),
        readme_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        global_batch=16,
        draw=draw_windows,
    ),
    "resnet": Workload(
        model=lambda _: ResNet(10, depth=18, width=16, channels=1, stem="small", norm="group"),
        inputs=("image",),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        mean_loss=smoothed_mean,
        optimizer=tm.optim.sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        readme_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        global_batch=64,
        draw=draw_digits,
    ),
    "text": Workload(
        model=build_classifier,
        inputs=("pieces", "grams", "attention_mask"),
        loss=tm.losses.cross_entropy(label_smoothing=0.1),
        mean_loss=smoothed_mean,
        optimizer=tm.optim.adamw(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        readme_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        global_batch=64,
        draw=draw_snippets,
    ),
}


class Work:
    """A workload on one of `num_procs` processes, with `tensors` of all its samples; `folder` takes what is written."""

    def __init__(self, workload: Workload, tensors: Batch, rank: int, num_procs: int, folder: Path) -> None:
        self.workload = workload
        self.tensors = tensors
        self.num_procs = num_procs
        self.folder = folder
        self.rank_batch = workload.global_batch // num_procs
        starts = [number * workload.global_batch + rank * self.rank_batch for number in range(NUM_BATCHES)]
        self.batches = [
            {key: each[start : start + self.rank_batch].clone() for key, each in tensors.items()} for start in starts
        ]
        num_samples = NUM_BATCHES * workload.global_batch
        # So long that no epoch ends while time is taken.
        self.samples = [{key: each[index] for key, each in tensors.items()} for index in range(num_samples)] * 100

    def build_model(self) -> nn.Module:
        """The model with its first weights, equal in all contestants and ranks."""
        torch.manual_seed(SEED)
        return self.workload.model(self.tensors)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """torch's own AdamW or SGD: fused, and with the groups and options of Trimaran's job."""
        builder = self.workload.optimizer
        return builder.build(model.named_parameters(), builder.rate(self.workload.global_batch).value)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of this rank's batch, as a hand-written step computes it."""
        return self.workload.mean_loss(model(*(batch[key] for key in self.workload.inputs)), batch)

    def job(self) -> tm.Job:
        """The same as a Trimaran job."""
        return tm.Job(
            model=partial(self.workload.model, self.tensors),
            data=self.samples,
            loss=self.workload.loss,
            optimizer=self.workload.optimizer,
            global_batch=self.workload.global_batch,
            inputs=self.workload.inputs,
            steps=1_000_000,
            clip=CLIP,
            seed=SEED,
        )
