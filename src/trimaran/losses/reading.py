"""What losses read: tensors of a batch by key, logits of a model's output, class indices that mean something."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.errors import LossError

if TYPE_CHECKING:
    from trimaran.job import Batch


def tensor_of(batch: Batch, key: str, asked_by: str) -> Tensor:
    """The batch's tensor under `key`. Raises LossError naming the key and those there are."""
    value = batch.get(key)
    if isinstance(value, Tensor):
        return value
    if value is not None:
        raise LossError(
            f"{asked_by} reads batch[{key!r}], which is {_article(type(value).__name__)}.",
            "A batch holds tensors.",
            "Turn it into a tensor in the data's collate.",
        )
    close = difflib.get_close_matches(key, list(batch), n=1, cutoff=0.4)
    raise LossError(
        f"{asked_by} reads batch[{key!r}]; the batch has {', '.join(map(repr, batch)) or 'no keys'}.",
        "A loss names the batch keys that it reads.",
        f"Name the right key in the loss (did you mean {close[0]!r}?)." if close else "Name the right key in the loss.",
    )


def logits_of(output: Any, asked_by: str) -> Tensor:
    """The floating-point tensor in a model's output, halves raised to float32. Raises LossError for what has none.

    Understood: a tensor, an object with `.logits`, a mapping with "logits". A sum over a vocabulary or a batch kept in
    16 bits is off by whole percents, hence the float32; float64 stays.
    """
    found = output
    if not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("logits")
    if not isinstance(found, Tensor):
        raise LossError(
            f"{asked_by} cannot read the model's output: the model returned {_describe(output)}.",
            'It reads a tensor, an object with .logits, or a mapping with "logits".',
            "Return one of these, or write tm.losses.custom(total=..., weight=...) for this output.",
        )
    if not found.is_floating_point():
        raise LossError(
            f"{asked_by} got a model output of {found.dtype}.",
            "A model's output is floating point.",
            "Return the logits, before any argmax.",
        )
    return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found


def class_indices(batch: Batch, key: str, asked_by: str) -> Tensor:
    """The batch's class indices under `key` as int64, any shape. Raises LossError for what is not whole numbers.

    int64 comes before any comparison with ignore_index: as uint8, 156 and -100 are the same number.
    """
    indices = tensor_of(batch, key, asked_by)
    if indices.is_floating_point() or indices.is_complex():
        raise LossError(
            f"{asked_by} reads batch[{key!r}], which holds {indices.dtype}.",
            "Class labels are whole numbers.",
            "Give class indices; for probabilities as targets write tm.losses.custom(total=..., weight=...).",
        )
    return indices.long()


def count_labels(indices: Tensor, ignore_index: int, asked_by: str) -> Tensor:
    """How many labels count, as a float64 scalar. Raises LossError for a negative one, seen on the CPU only."""
    counted = indices != ignore_index
    if indices.device.type == "cpu":  # elsewhere the look would wait for the device
        wrong = indices[counted & (indices < 0)]
        if wrong.numel():
            raise LossError(
                f"{asked_by} got the label {int(wrong[0])}.",
                f"A label is a class index from 0, or ignore_index={ignore_index}, which counts for nothing.",
                f"Write {ignore_index} where nothing is to be learnt, or give ignore_index={int(wrong[0])}.",
            )
    return counted.sum(dtype=torch.float64)


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float, asked_by: str) -> Tensor:
    """Cross-entropy of logits [N, C, ...] with labels [N, ...], summed; ignored labels give 0 and no gradient.

    The sum is apart from the losses because it is then a tree on every device: 1e-7 off at 10^6 tokens in float32
    (measured), which is one rounding. Gradients are the same bits as with reduction="sum", and it is no slower.
    """
    try:
        losses = F.cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")
    except IndexError:  # only the CPU says so; a GPU stops with an assertion of its own
        raise _no_such_class(labels, logits.shape[1], ignore_index, asked_by) from None
    return losses.sum()


def _no_such_class(labels: Tensor, num_classes: int, ignore_index: int, asked_by: str) -> LossError:
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= num_classes))]
    return LossError(
        f"{asked_by} got the label {int(wrong[0])}; the model has {num_classes} classes.",
        f"Labels lie in 0 to {num_classes - 1}, or are ignore_index={ignore_index}.",
        "Give the model as many classes (or vocabulary entries) as the data has, or correct the labels.",
    )


def _describe(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"{_article(type(output).__name__)} with {', '.join(map(repr, output)) or 'no keys'}"
    if isinstance(output, (tuple, list)):
        return f"{_article(type(output).__name__)} of {', '.join(type(item).__name__ for item in output) or 'nothing'}"
    return "None" if output is None else _article(type(output).__name__)


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"
