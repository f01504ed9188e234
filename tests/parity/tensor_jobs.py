"""The jobs of the tensor-parallel tests: plain models in every way of writing attention, and their plans."""

# Shapes: B samples, T positions, D width, H heads, V vocabulary entries.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from parity_engine import start, whole_gradients, whole_state, whole_weights
from parity_jobs import own_total, own_weight
from parity_plain import Trace, optimizer_state
from torch import Tensor, nn

import trimaran as tm
from trimaran.data import Order
from trimaran.layout import Precision

WIDTH, HEADS, HEAD_DIM, LONGEST = 12, 4, 3, 7
SEED, GLOBAL_BATCH, NUM_SAMPLES, EPOCHS = 5, 7, 16, 2.0  # five steps, the last of four samples

Attend = Literal["separate", "manual", "chunk", "split", "view", "heads_first", "grouped"]


@dataclass(frozen=True)
class TensorCase:
    """One training run of a `TinyGPT` in a layout."""

    layout: str = ""
    attend: Attend = "separate"
    vocabulary: int = 16
    tied: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    precision: Precision = "fp64"
    micro_batch: int | None = None
    smoothing: float = 0.0
    plan: Literal["whole", "blocks"] = "whole"
    own_loss: bool = False

    def __str__(self) -> str:
        words = (self.layout.replace(" ", "-"), self.attend, f"vocab{self.vocabulary}", self.optimizer, self.plan)
        return "-".join([*words, *(["tied"] if self.tied else []), f"micro{self.micro_batch or 'whole'}"])

    @property
    def num_ranks(self) -> int:
        words = dict(word.split("=") for word in self.layout.split())
        return int(words.get("dp", 1)) * int(words.get("tp", 1))


class Attention(nn.Module):
    """Causal attention over rotary positions, written in one of the usual ways; with biases."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.kv_heads = HEADS // 2 if attend == "grouped" else HEADS
        sizes = [HEADS * HEAD_DIM, self.kv_heads * HEAD_DIM, self.kv_heads * HEAD_DIM]
        if attend in ("separate", "manual"):
            self.query, self.key, self.value = (nn.Linear(WIDTH, size) for size in sizes)
        else:
            self.qkv = nn.Linear(WIDTH, sum(sizes))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        angles = torch.arange(LONGEST)[:, None] * torch.tensor([1.0, 0.3, 0.1])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("causal", torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = (part.transpose(1, 2) for part in self.project(x_BTD))
        q, k = q * self.cos[:T], k * self.cos[:T]
        if self.attend == "manual":
            scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
            mixed = scores.masked_fill(~self.causal[:T, :T], float("-inf")).softmax(-1) @ v
        elif self.attend == "separate":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal[:T, :T])
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != HEADS)
        return self.out(mixed.transpose(1, 2).reshape(B, T, -1))

    def project(self, x: Tensor) -> Any:
        B, T, _ = x.shape
        if self.attend in ("separate", "manual"):
            return (layer(x).view(B, T, -1, HEAD_DIM) for layer in (self.query, self.key, self.value))
        fused = self.qkv(x)
        if self.attend == "view":
            return fused.view(B, T, 3, HEADS, HEAD_DIM).unbind(2)
        if self.attend == "heads_first":
            return fused.view(B, T, HEADS, 3, HEAD_DIM).unbind(3)
        if self.attend == "chunk":
            return (part.view(B, T, HEADS, HEAD_DIM) for part in fused.chunk(3, dim=-1))
        kv_size = self.kv_heads * HEAD_DIM
        return (part.view(B, T, -1, HEAD_DIM) for part in fused.split([HEADS * HEAD_DIM, kv_size, kv_size], dim=-1))


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(attend)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.gain * self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Two blocks; positions learned; one parameter frozen, and one that nothing uses."""

    def __init__(self, case: TensorCase) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocabulary, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.blocks = nn.ModuleList(Block(case.attend) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, case.vocabulary, bias=not case.tied)
        if case.tied:
            self.head.weight = self.embed.weight
        for name, each in self.named_parameters():
            if "norm" in name or name.endswith("bias"):
                nn.init.normal_(each, mean=float(name.endswith("weight")), std=0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.frozen + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan_of(case: TensorCase) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "separate": {f"blocks.*.attention.{name}": tm.colwise(heads=HEADS) for name in ("query", "key", "value")},
        "heads_first": {"blocks.*.attention.qkv": tm.colwise(heads=HEADS)},
        "grouped": {"blocks.*.attention.qkv": tm.colwise(heads=HEADS, kv_heads=HEADS // 2, parts=3)},
    }
    fused = {"blocks.*.attention.qkv": tm.colwise(heads=HEADS, parts=3)}
    attention = columns.get("separate" if case.attend == "manual" else case.attend, fused)
    plan = {**attention, "blocks.*.attention.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    if case.plan == "whole":
        plan |= {"embed": "vocab", "head": "vocab", "blocks.*.norm*": "sequence", "norm": "sequence"}
    return plan


def samples(vocabulary: int) -> list[dict[str, Tensor]]:
    """Ragged sequences with some labels ignored; every fifth sample ignores all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(NUM_SAMPLES):
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        input_ids = torch.randint(vocabulary, (length,), generator=generator)
        ignored = torch.rand(length, generator=generator) < (1.0 if index % 5 == 3 else 0.25)
        found.append({"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, -100)})
    return found


def build_job(case: TensorCase) -> tm.Job:
    optimizer = (
        tm.optim.sgd(lr=0.2, momentum=0.9, weight_decay=0.05)
        if case.optimizer == "sgd"
        else tm.optim.adamw(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    )
    return tm.Job(
        model=lambda: TinyGPT(case),
        data=samples(case.vocabulary),
        valid=samples(case.vocabulary)[:9],
        collate=tm.data.pad({"input_ids": 0}),
        loss=tm.losses.custom(total=own_total, weight=own_weight)
        if case.own_loss
        else tm.losses.next_token(label_smoothing=case.smoothing),
        metrics={"accuracy": tm.losses.token_accuracy()},
        optimizer=optimizer,
        global_batch=GLOBAL_BATCH,
        epochs=EPOCHS,
        clip=0.5,
        seed=SEED,
        tp_plan=plan_of(case),
    )


def engine_run(case: TensorCase) -> Trace:
    """Trains the case to its end on this rank."""
    engine, loader, _ = start(
        build_job(case), precision=case.precision, micro_batch=case.micro_batch, layout=case.layout
    )
    trace = Trace()
    for batch in loader:
        engine.accumulate(batch)
        if batch.index == 0:
            trace.first_gradients = whole_gradients(engine)
        result = engine.update()
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    trace.weights = whole_weights(engine)
    trace.state = whole_state(engine)
    return trace


def plain_run(case: TensorCase) -> Trace:
    """One process, the mean loss over the whole batch, torch's own clipping and for-loop optimizer."""
    torch.manual_seed(SEED)
    model = TinyGPT(case)
    if case.precision == "fp64":
        model.double()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = _optimizer(case, trained)
    trace = Trace()
    for batch in _global_batches(case):
        optimizer.zero_grad()
        loss = _mean_loss(case, model, batch)
        loss.backward()
        for each in trained.values():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        if not trace.losses:
            trace.first_gradients = {name: each.grad.clone() for name, each in trained.items()}
        trace.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), 0.5)))
        trace.losses.append(float(loss.detach()))
        optimizer.step()
    trace.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    trace.state = optimizer_state(optimizer, trained)
    return trace


def _global_batches(case: TensorCase) -> Iterator[list[dict[str, Tensor]]]:
    data = samples(case.vocabulary)
    _, ids = Order(NUM_SAMPLES, SEED).at(np.arange(round(EPOCHS * NUM_SAMPLES)))
    for first in range(0, len(ids), GLOBAL_BATCH):
        yield [data[index] for index in ids[first : first + GLOBAL_BATCH].tolist()]


def _mean_loss(case: TensorCase, model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    pad = nn.utils.rnn.pad_sequence
    inputs = pad([each["input_ids"] for each in batch], batch_first=True)
    labels = pad([each["labels"] for each in batch], batch_first=True, padding_value=-100)
    if case.own_loss:
        return own_total(model(inputs), {"labels": labels}) / own_weight({"labels": labels})
    logits, labels = model(inputs)[:, :-1], labels[:, 1:]
    options: dict[str, Any] = {"ignore_index": -100, "label_smoothing": case.smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options) / (labels != -100).sum()


def _optimizer(case: TensorCase, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    decay = 0.05 if case.optimizer == "sgd" else 0.1
    groups = [
        {"params": [each for each in trained.values() if each.dim() >= 2], "weight_decay": decay},
        {"params": [each for each in trained.values() if each.dim() < 2], "weight_decay": 0.0},
    ]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9, foreach=False, fused=False)
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), foreach=False, fused=False)
