"""Losses and metrics as two functions: a sum, and the weight it is divided by (the `Loss` protocol of job.py).

A mean depends on how a batch is cut; a sum and a weight do not: add both over any micro-batches and ranks, divide once.
"""

from __future__ import annotations

from trimaran.losses.classes import accuracy, cross_entropy
from trimaran.losses.custom import custom
from trimaran.losses.tokens import next_token, token_accuracy
from trimaran.losses.values import mse

__all__ = ["accuracy", "cross_entropy", "custom", "mse", "next_token", "token_accuracy"]
