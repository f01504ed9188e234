"""What a rank receives of one global batch: its micro-batches. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward, on the CPU as the loader made them.

    `position` is that of its first sample in the run, from which the forward's randomness is derived.
    A `weightless` one runs for lockstep only and counts for nothing.
    """

    tensors: Mapping[str, Tensor]
    position: int
    num_samples: int
    weightless: bool = False


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of the global batch of step `index` (from 0), which has `num_samples` over all ranks.

    `total_weight` is the loss's weight over all ranks, where it has been agreed on ahead of the step.
    """

    index: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]
    total_weight: float | None = None
