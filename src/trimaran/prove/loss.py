"""The loss before training: is it a sum, and is it what chance gives?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from trimaran.batch import MicroBatch
from trimaran.engine import Engine
from trimaran.engine.buffers import unchanged_buffers
from trimaran.job import Job
from trimaran.losses import cross_entropy, mse, next_token
from trimaran.losses.reading import logits_of
from trimaran.prove.dry_run import DryRun
from trimaran.prove.finding import Finding, failed, failed_by, passed, skipped

NAMES = ("loss_sum", "first_loss")

_SUM_RULE = "A loss is a sum over samples, divided by the weight of the whole global batch."
_CHANCE_RULE = "A model that knows nothing gives each of C classes 1/C: a loss of ln C, with label smoothing too."
_TOO_HIGH = 1.5
_TOO_LOW = 0.5


def look_at_loss(job: Job, dry: DryRun, found: Mapping[str, Finding]) -> Iterator[Finding]:
    """Whether the loss is a sum, and whether its first value is what chance gives."""
    yield _judge_sum(dry, found)
    yield _judge_first_loss(job, dry)


def smallest_loss(job: Job, engine: Engine, micro_batch: MicroBatch) -> float | None:
    """What a perfect prediction gives: the entropy of smoothed labels, 0 without smoothing; None for other losses."""
    if isinstance(job.loss, mse):
        return 0.0
    if not isinstance(job.loss, (next_token, cross_entropy)):
        return None
    smoothing, num_classes = job.loss.label_smoothing, _count_classes(engine, micro_batch, job.loss)
    rest = smoothing / num_classes
    return -sum(
        share * math.log(share) * times
        for share, times in ((1 - smoothing + rest, 1), (rest, num_classes - 1))
        if share
    )


def _judge_sum(dry: DryRun, found: Mapping[str, Finding]) -> Finding:
    if dry.loss_error is None:
        return passed("loss_sum", "a batch's loss is that of its two halves together", _SUM_RULE)
    # Halves differ from the whole for either of these reasons too.
    for name, why in (
        ("independent_samples", "samples change each other's outputs"),
        ("evaluation_keeps_state", "evaluation changes the model"),
        ("evaluation_keeps_randomness", "evaluation is not the same each time"),
    ):
        if name in found and found[name].status == "failed":
            return skipped("loss_sum", f"{why}, so a batch cannot be compared with its halves")
    return failed_by("loss_sum", dry.loss_error)


def _judge_first_loss(job: Job, dry: DryRun) -> Finding:
    name = "first_loss"
    engine, micro_batch, loss = dry.engine, dry.micro_batch, dry.loss
    assert engine is not None
    assert micro_batch is not None
    if float(job.loss.weight(micro_batch.tensors)) == 0:
        return skipped(name, "nothing in the first micro-batch has a weight in the loss")
    if not math.isfinite(loss):
        return failed(
            name,
            f"The first loss is {loss}.",
            "It is a number before any training.",
            "Look for a division by zero, the log of zero, or inputs that are not finite.",
        )
    if not isinstance(job.loss, (next_token, cross_entropy)):
        return skipped(name, f"it is {loss:.4g}; what chance gives is known for next_token and cross_entropy only")
    if job.weights is not None or _is_pretrained(engine.model):
        return skipped(name, f"pretrained; it is {loss:.4g}")
    num_classes = _count_classes(engine, micro_batch, job.loss)
    if num_classes < 2:
        return skipped(name, f"it is {loss:.4g}; with {num_classes} class there is no chance")
    return _compare(loss, num_classes, _entropy(micro_batch, job.loss))


def _compare(loss: float, num_classes: int, entropy: float) -> Finding:
    chance = math.log(num_classes)
    shown = f"{loss:.4g}; chance gives {chance:.4g} (ln {num_classes})"
    # A few samples and a usual initialisation move the loss of few classes by some tenths.
    if loss > max(_TOO_HIGH * chance, chance + 1.0):
        return failed(
            "first_loss",
            f"The first loss is {shown}.",
            _CHANCE_RULE,
            "The model is sure of what it cannot know: make its last layer's initial weights smaller, and normalise "
            "the inputs.",
        )
    # A last bias that starts at the classes' frequencies begins at their entropy, which may be far below ln C.
    if loss < _TOO_LOW * min(chance, entropy):
        return failed(
            "first_loss",
            f"The first loss is {shown}.",
            _CHANCE_RULE,
            "It knows the answer before training: look for labels among the inputs (a mask that is not causal, logits "
            "shifted twice); pretrained weights go into Job(weights=...).",
        )
    return passed("first_loss", shown, _CHANCE_RULE)


def _count_classes(engine: Engine, micro_batch: MicroBatch, loss: next_token | cross_entropy) -> int:
    with torch.no_grad(), unchanged_buffers(engine.model):
        logits = logits_of(engine.forward(engine.to_device(micro_batch)), type(loss).__name__)
    return logits.shape[loss.class_dim if isinstance(loss, cross_entropy) else -1]


def _entropy(micro_batch: MicroBatch, loss: next_token | cross_entropy) -> float:
    """That of the micro-batch's labels, in nats."""
    if isinstance(loss, cross_entropy):
        key = loss.target
    else:
        key = loss.labels if loss.labels in micro_batch.tensors else loss.inputs
    labels = micro_batch.tensors[key].flatten()
    counts = labels[labels != loss.ignore_index].unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    return float(-(shares * shares.log()).sum())


def _is_pretrained(model: nn.Module) -> bool:
    """Whether a module says where its weights come from, as `from_pretrained` of Hugging Face leaves it."""
    return any(isinstance(found := getattr(each, "name_or_path", ""), str) and found for each in model.modules())
