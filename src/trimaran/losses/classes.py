"""Losses and metrics of classifiers: whole samples, tokens or pixels."""

# Shapes: N samples of the micro-batch, C classes, ... further dimensions (positions, pixels).

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimaran.errors import LossError
from trimaran.losses.checks import check_classes, check_key
from trimaran.losses.reading import class_indices, count_labels, logits_of, summed_cross_entropy

if TYPE_CHECKING:
    from trimaran.job import Batch


@dataclass(frozen=True)
class cross_entropy:
    """Cross-entropy in nats of logits [N, C] with class indices [N], or of [N, ..., C] with [N, ...].

    `class_dim=1` reads logits as [N, C, ...], as segmentation models return them. The weight is the number of labels
    that are not `ignore_index`. Raises LossError for keys, shapes and labels that do not fit.
    """

    target: str = "label"
    label_smoothing: float = 0.0
    ignore_index: int = -100
    class_dim: int = -1

    def __post_init__(self) -> None:
        check_key("cross_entropy", "target", self.target)
        check_classes("cross_entropy", self.ignore_index, self.label_smoothing)
        _check_class_dim("cross_entropy", self.class_dim)

    def weight(self, batch: Batch, /) -> Tensor:
        """How many labels count, as a float64 scalar."""
        return _count(batch, self)

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """The summed cross-entropy, a scalar with its graph, in the logits' precision and at least float32."""
        logits, labels = _aligned(output, batch, self)
        if self.class_dim == -1:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        return summed_cross_entropy(logits, labels, self.ignore_index, self.label_smoothing, "cross_entropy")


@dataclass(frozen=True)
class accuracy:
    """The share of labels among the `top` classes that the model ranks first; shapes as in `cross_entropy`."""

    target: str = "label"
    top: int = 1
    ignore_index: int = -100
    class_dim: int = -1

    def __post_init__(self) -> None:
        check_key("accuracy", "target", self.target)
        check_classes("accuracy", self.ignore_index)
        _check_class_dim("accuracy", self.class_dim)
        if not isinstance(self.top, int) or isinstance(self.top, bool) or self.top < 1:
            raise LossError(f"accuracy(top={self.top!r}).", "It counts classes.", "Give a whole number from 1.")

    def weight(self, batch: Batch, /) -> Tensor:
        """How many labels count, as a float64 scalar."""
        return _count(batch, self)

    def total(self, output: Any, batch: Batch, /) -> Tensor:
        """How many were right, as a float32 scalar: exact up to 2^24 labels of one micro-batch."""
        logits, labels = _aligned(output, batch, self)
        num_classes = logits.shape[self.class_dim]
        if self.top > num_classes:
            raise LossError(
                f"accuracy(top={self.top}) got logits of {num_classes} classes.",
                "The label is looked for among the first of all classes.",
                f"Give top from 1 to {num_classes}.",
            )
        best = logits.topk(self.top, dim=self.class_dim).indices
        right = (best == labels.unsqueeze(self.class_dim)).any(self.class_dim) & (labels != self.ignore_index)
        return right.sum().float()


def _check_class_dim(name: str, class_dim: int) -> None:
    if class_dim not in (-1, 1):
        raise LossError(
            f"{name}(class_dim={class_dim!r}).",
            "Logits hold the classes in their last dimension (-1) or in their second (1).",
            "Give -1 or 1.",
        )


def _aligned(output: Any, batch: Batch, loss: cross_entropy | accuracy) -> tuple[Tensor, Tensor]:
    asked_by = type(loss).__name__
    logits = logits_of(output, asked_by)
    labels = class_indices(batch, loss.target, asked_by)
    if not _fit(logits, labels, loss.class_dim):
        raise LossError(
            f"{asked_by} got logits of shape {list(logits.shape)} and batch[{loss.target!r}] of {list(labels.shape)}.",
            "Labels have the shape of the logits without the classes, "
            f"which are looked for in dimension {loss.class_dim}.",
            _remedy(logits, labels, loss.class_dim),
        )
    return logits, labels


def _fit(logits: Tensor, labels: Tensor, class_dim: int) -> bool:
    if logits.ndim < 2:
        return False
    without_classes = list(logits.shape)
    del without_classes[class_dim]
    return without_classes == list(labels.shape)


def _remedy(logits: Tensor, labels: Tensor, class_dim: int) -> str:
    if _fit(logits, labels, 1 if class_dim == -1 else -1):
        return f"Write class_dim={1 if class_dim == -1 else -1}."
    if labels.ndim == logits.ndim and labels.shape[-1] == 1:
        return "Drop the labels' last dimension, of size 1."
    return "Give one label for each place the model classifies."


def _count(batch: Batch, loss: cross_entropy | accuracy) -> Tensor:
    asked_by = type(loss).__name__
    return count_labels(class_indices(batch, loss.target, asked_by), loss.ignore_index, asked_by)
