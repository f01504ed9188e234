"""Randomness that is derived, never carried along: a seed for a purpose is a hash of what it is for."""

from __future__ import annotations

import random

import numpy as np
import torch

from trimaran.world.mix import derive_one


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2^63) from whole numbers in [0, 2^63), such as (run seed, step, position)."""
    return derive_one(*parts) >> 1


def seed_everything(seed: int) -> None:
    """Seeds the default generators of Python, numpy and torch (all devices), as a constructor may use any of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_forward(device: torch.device, seed: int) -> None:
    """Seeds the generators that a forward on `device` may draw from: torch's for dropout, also Python's and numpy's.

    Costs some 20 µs. Apart from `seed_everything`, which reaches every device's generator and costs more.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
