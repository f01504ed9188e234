"""The jobs of the parity tests: small models with everything that is easily summed wrongly, and unequal data."""

# Shapes: B samples, T positions, D width, H heads, V vocabulary entries.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran as tm
from trimaran.job import Loss, OptimizerBuilder
from trimaran.layout import Precision

VOCABULARY, WIDTH, HEADS, LONGEST = 11, 8, 2, 9
SEED = 5


@dataclass(frozen=True)
class Case:
    """One training run: what, on how many ranks, cut how. By default five steps, of which the last is partial."""

    model: Literal["transformer", "convnet", "stack"] = "transformer"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    precision: Precision = "fp64"
    dp: int = 1
    micro_batch: int | None = None
    global_batch: int = 7
    num_samples: int = 16
    epochs: float = 2.0
    clip: float | None = 0.5
    own_loss: bool = False
    layout: str = ""

    def __str__(self) -> str:
        cut = f"batch{self.global_batch}-dp{self.dp}-micro{self.micro_batch or 'whole'}"
        cut += f"-{self.layout.replace(' ', '-')}" if self.layout else ""
        return f"{self.model}-{self.optimizer}-{self.precision}-{cut}{'-own' if self.own_loss else ''}"


class Attention(nn.Module):
    """Causal self-attention; its key bias has a true gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.out.weight, std=0.05)
        self.register_buffer("causal", torch.tril(torch.ones(LONGEST, LONGEST)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(B, T, HEADS, D // HEADS).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) * (D // HEADS) ** -0.5
        shares = scores.masked_fill(self.causal[:T, :T] == 0, float("-inf")).softmax(-1)
        return self.out((shares @ v).transpose(1, 2).reshape(B, T, D))


class Transformer(nn.Module):
    """One block, tied embedding and head, a frozen parameter, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.frozen + self.places(torch.arange(input_ids.shape[1]))
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x))


class Block(nn.Module):
    """Attention and two ways through a projection, with parameters that are easily cut wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 3)  # fewer rows than there are ranks
        self.down = nn.Linear(3, WIDTH)
        self.down.weight = nn.Parameter(0.3 * torch.randn(3, WIDTH).t())  # transposed in memory
        self.gain = nn.Parameter(torch.tensor(1.1))  # nothing to cut along
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x_BTD = x_BTD + self.attention(self.norm(x_BTD))
        return x_BTD + self.gain * self.down(F.gelu(self.up(self.frozen(x_BTD))))


class Stack(nn.Module):
    """Six blocks, of which two share a projection, one is frozen and one is never used; tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.blocks[3].up = self.blocks[2].up
        self.blocks[4].requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks[:5]:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with GroupNorm, one of them in channels_last, and a weight that lies transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),  # a bias before a norm has a gradient of little but rounding
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, bias=False).to(memory_format=torch.channels_last),
            nn.GroupNorm(3, 6),
        )
        self.head = nn.Linear(6, 5)
        self.head.weight = nn.Parameter(torch.randn(6, 5).t())

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image).relu().mean((2, 3)))


MODELS = {"transformer": Transformer, "convnet": ConvNet, "stack": Stack}


def token_samples(count: int, *, seed: int = 1) -> list[dict[str, Tensor]]:
    """Ragged sequences with some labels ignored; every fifth sample ignores all."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        input_ids = torch.randint(VOCABULARY, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < (1.0 if index % 5 == 3 else 0.25)
        samples.append({"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, -100)})
    return samples


def image_samples(count: int) -> list[dict[str, Tensor]]:
    """Images with a class, which every fifth sample ignores."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, 7, 7, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    labels[3::5] = -100
    return [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]


def build_job(case: Case) -> tm.Job:
    """The job of a case, as a user writes it."""
    tokens = case.model != "convnet"
    return tm.Job(
        model=MODELS[case.model],
        data=token_samples(case.num_samples) if tokens else image_samples(case.num_samples),
        collate=tm.data.pad({"input_ids": 0}) if tokens else None,
        inputs=("input_ids",) if tokens else ("image",),
        loss=_loss(case),
        metrics={"accuracy": tm.losses.token_accuracy() if tokens else tm.losses.accuracy()},
        optimizer=_optimizer(case),
        global_batch=case.global_batch,
        epochs=case.epochs,
        clip=case.clip,
        seed=SEED,
    )


def _loss(case: Case) -> Loss:
    if case.own_loss:
        return tm.losses.custom(total=own_total, weight=own_weight)
    return tm.losses.next_token() if case.model != "convnet" else tm.losses.cross_entropy()


def _optimizer(case: Case) -> OptimizerBuilder:
    if case.optimizer == "sgd":
        return tm.optim.sgd(lr=0.2, momentum=0.9, weight_decay=0.05)
    return tm.optim.adamw(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def own_total(output: Tensor, batch: Any) -> Tensor:
    """A user's own loss, which weighs each sequence by its length: squared logits at the label."""
    labels_BT = batch["labels"]
    picked_BT = output.gather(-1, labels_BT.clamp(min=0)[..., None]).squeeze(-1)
    squared_BT = torch.where(labels_BT == -100, 0.0, (picked_BT - 1).square())
    return (squared_BT.sum(1) * own_lengths(batch)).sum()


def own_weight(batch: Any) -> Tensor:
    """What `own_total` is divided by: samples, counted by length."""
    return own_lengths(batch).sum()


def own_lengths(batch: Any) -> Tensor:
    return (batch["labels"] != -100).sum(1).float() + 0.5
