"""One side of a comparison: what a few steps of a job gave in one layout, gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from trimaran.layout import Precision
from trimaran.prove.verify_activations import Activation
from trimaran.prove.verify_traffic import Collectives

FIRST_WEIGHTS = "first weights"
FIRST_GRADIENTS = "gradients of step 1"
EARLY_WEIGHTS, EARLY_STATE = "weights after step 1", "state after step 1"
SECOND_GRADIENTS = "gradients of step 2"
WEIGHTS, STATE = "weights at the end", "state at the end"


class Unlike(NamedTuple):
    """A tensor of which a rank holds other bits than rank 0, at the moment so named."""

    moment: str
    name: str
    rank: int


@dataclass
class Side:
    """What one layout gave; gradients and optimizer state are whole tensors on the CPU.

    `tensors` has them by moment, then by name. Where ranks hold unlike gradients, `rank_sums` has, by axis, the sums
    of what its ranks hold. `num_micro_batches` is one rank's, `cuts` are the forwards of the first step as (position,
    samples), and `weight` is what the first batch's loss is divided by. `order` has parameters in the order of their
    first use in a forward; `num_samples` are those of the first batch, over all ranks.
    """

    job: str
    num_parameters: int
    global_batch: int
    layout: str
    precision: Precision
    num_ranks: int
    dp: int
    tp: int
    micro_batch: int
    num_micro_batches: int
    num_samples: int
    optimizer: str
    clip: float | None
    steps: int
    dropout: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    weight: float = 0.0
    loss_scale: float = 1.0
    cuts: list[tuple[int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    unlike: list[Unlike] = field(default_factory=list)
    collectives: dict[str, Collectives] | None = None
    draws_numbers: bool = False
    rowless: list[str] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    rank_sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def at(self, moment: str) -> Mapping[str, Tensor]:
        """The tensors of a moment by name; none where there was no such step."""
        return self.tensors.get(moment, {})
