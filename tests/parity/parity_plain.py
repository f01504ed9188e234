"""The reference: one process of plain PyTorch that sees the whole global batch at once. Nothing of the engine is used.

Only the data's order is asked for; what it must be is tested with the data.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from parity_jobs import MODELS, SEED, Case, image_samples, own_lengths, own_total, token_samples
from torch import Tensor, nn

from trimaran.data import Order

FP16_SCALE = 2.0**16


@dataclass
class Trace:
    """What a training run leaves to be compared: by parameter name, or by step."""

    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    num_forwards: int = 0


def plain_run(case: Case) -> Trace:
    """Trains as a textbook does: mean loss over the whole batch, torch's own clipping, the for-loop optimizer."""
    torch.manual_seed(SEED)
    model = MODELS[case.model]()
    if case.precision == "fp64":
        model.double()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = _optimizer(case, trained)
    trace = Trace()
    for samples in _global_batches(case):
        loss = _mean_loss(case, model, samples)
        scale = FP16_SCALE if case.precision == "fp16" else 1.0
        optimizer.zero_grad()
        (loss * scale).backward()
        for each in trained.values():
            # torch leaves out what nothing used; the engine promises a gradient of zero
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad / scale
        if not trace.losses:
            trace.first_gradients = {name: each.grad.clone() for name, each in trained.items()}
        limit = float("inf") if case.clip is None else case.clip
        trace.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), limit)))
        trace.losses.append(float(loss.detach()))
        optimizer.step()
    trace.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    trace.state = optimizer_state(optimizer, trained)
    return trace


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Kind and parameter name -> tensor of the optimizer's state, such as "exp_avg/head.weight"."""
    return {
        f"{kind}/{name}": value.detach().clone()
        for name, each in parameters.items()
        for kind, value in optimizer.state[each].items()
        if isinstance(value, Tensor)
    }


def _global_batches(case: Case) -> list[list[dict[str, Tensor]]]:
    data = token_samples(case.num_samples) if case.model != "convnet" else image_samples(case.num_samples)
    total = round(case.epochs * case.num_samples)
    _, ids = Order(case.num_samples, SEED).at(np.arange(total))
    samples = [data[index] for index in ids.tolist()]
    return [samples[start : start + case.global_batch] for start in range(0, total, case.global_batch)]


def _mean_loss(case: Case, model: nn.Module, samples: list[dict[str, Tensor]]) -> Tensor:
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    context = nullcontext() if compute is None else torch.autocast("cpu", dtype=compute)
    if case.model == "convnet":
        images = torch.stack([sample["image"] for sample in samples])
        with context:
            logits = model(images.double() if case.precision == "fp64" else images)
        labels = torch.stack([sample["label"] for sample in samples])
        return F.cross_entropy(_wide(logits), labels, ignore_index=-100, reduction="sum") / (labels != -100).sum()
    tokens = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    with context:
        logits = model(tokens)
    if case.own_loss:
        batch = {"labels": labels}
        return own_total(_wide(logits), batch) / own_lengths(batch).sum()
    logits, labels = _wide(logits)[:, :-1], labels[:, 1:]
    summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return summed / (labels != -100).sum()


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _optimizer(case: Case, trained: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    decay = 0.05 if case.optimizer == "sgd" else 0.1
    groups = [
        {"params": [each for each in trained.values() if each.dim() >= 2], "weight_decay": decay},
        {"params": [each for each in trained.values() if each.dim() < 2], "weight_decay": 0.0},
    ]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9, foreach=False, fused=False)
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), foreach=False, fused=False)
