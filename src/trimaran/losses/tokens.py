"""Losses and metrics of language models: the next token."""

# Shapes: B samples of the micro-batch, T positions, V vocabulary entries.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from trimaran.errors import LossError
from trimaran.losses.checks import check_classes, check_key
from trimaran.losses.reading import class_indices, count_labels, logits_of, summed_cross_entropy

if TYPE_CHECKING:
    from trimaran.job import Batch


@dataclass(frozen=True)
class next_token:
    """Cross-entropy of each next token, in nats, over logits [B, T, V].

    Labels [B, T] are as Hugging Face gives them, unshifted: position t is compared with label t + 1. They
    are batch["labels"] where the batch has it, else batch[inputs], in which padding would count: data that pads gives
    labels. A key other than "labels" must be there.
    The weight is the number of labels that count. Raises LossError for keys, shapes and labels that do not fit.
    """

    labels: str = "labels"
    inputs: str = "input_ids"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    takes_cut_logits: ClassVar[bool] = True
    """Whether a total needs the vocabulary's logits in one place, with tensor parallelism; it does not."""

    def __post_init__(self) -> None:
        check_key("next_token", "labels", self.labels)
        check_key("next_token", "inputs", self.inputs)
        check_classes("next_token", self.ignore_index, self.label_smoothing)

    def weight(self, batch: Batch, /) -> Tensor:
        """How many labels count, as a float64 scalar."""
        return count_labels(_next_labels(batch, self), self.ignore_index, "next_token")

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """The summed cross-entropy, a scalar with its graph, in the logits' precision and at least float32."""
        logits_BTV, labels_BT = _aligned(output, batch, self)
        return summed_cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT.flatten(), self.ignore_index, self.label_smoothing, "next_token"
        )


@dataclass(frozen=True)
class token_accuracy:
    """The share of next tokens that the model ranks first; shapes, keys and weight as in `next_token`."""

    labels: str = "labels"
    inputs: str = "input_ids"
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_key("token_accuracy", "labels", self.labels)
        check_key("token_accuracy", "inputs", self.inputs)
        check_classes("token_accuracy", self.ignore_index)

    def weight(self, batch: Batch, /) -> Tensor:
        """How many labels count, as a float64 scalar."""
        return count_labels(_next_labels(batch, self), self.ignore_index, "token_accuracy")

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """How many were right, as a float32 scalar: exact up to 2^24 tokens of one micro-batch."""
        logits_BTV, labels_BT = _aligned(output, batch, self)
        right_BT = (logits_BTV.argmax(-1) == labels_BT) & (labels_BT != self.ignore_index)
        return right_BT.sum().float()


def _next_labels(batch: Batch, loss: next_token | token_accuracy) -> Tensor:
    """Labels [B, T] moved one to the left, the last column ignored: the logits then need no copy without it."""
    asked_by = type(loss).__name__
    # Only the customary name may be absent: a key that the user wrote is asked for, not replaced.
    absent = loss.labels == "labels" and loss.labels not in batch
    key = loss.inputs if absent else loss.labels
    labels_BT = class_indices(batch, key, asked_by)
    if labels_BT.ndim != 2:
        raise LossError(
            f"{asked_by} reads batch[{key!r}] of shape {list(labels_BT.shape)}.",
            "Labels of tokens have the shape [samples, positions].",
            "Give every sample one row of token ids.",
        )
    return F.pad(labels_BT[:, 1:], (0, 1), value=loss.ignore_index)


def _aligned(output: Any, batch: Batch, loss: next_token | token_accuracy) -> tuple[Tensor, Tensor]:
    asked_by = type(loss).__name__
    logits_BTV = logits_of(output, asked_by)
    labels_BT = _next_labels(batch, loss)
    if logits_BTV.ndim != 3 or logits_BTV.shape[:2] != labels_BT.shape:
        raise LossError(
            f"{asked_by} got logits of shape {list(logits_BTV.shape)} and labels of shape {list(labels_BT.shape)}.",
            "Logits have the shape [samples, positions, vocabulary], labels [samples, positions], both unshifted.",
            "Return logits for every position, and shift neither.",
        )
    return logits_BTV, labels_BT
