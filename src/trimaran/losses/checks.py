"""Checks of the options that losses and metrics share."""

from __future__ import annotations

from trimaran.errors import LossError


def check_classes(name: str, ignore_index: int, label_smoothing: float = 0.0) -> None:
    """Raises LossError for options no class loss can mean."""
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise LossError(
            f"{name}(ignore_index={ignore_index!r}).",
            "It is the label that counts for nothing.",
            "Give a whole number, such as -100.",
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise LossError(
            f"{name}(label_smoothing={label_smoothing!r}).",
            "It is the probability spread evenly over all classes.",
            "Give a number from 0 to below 1, such as 0.1.",
        )


def check_key(name: str, option: str, key: str) -> None:
    """Raises LossError for a batch key that is not a word."""
    if not isinstance(key, str) or not key:
        raise LossError(f"{name}({option}={key!r}).", "It names a key of the batch.", f'Write {option}="label".')
