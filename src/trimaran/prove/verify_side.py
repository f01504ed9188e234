"""One side of a comparison: what a few steps of a job gave in one layout, gathered, and how it lies on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimaran.layout import Precision
from trimaran.prove.verify_activations import Activation, flatten, unflatten
from trimaran.prove.verify_traffic import Collectives

FIRST_WEIGHTS = "first weights"
FIRST_GRADIENTS = "gradients of step 1"
EARLY_WEIGHTS, EARLY_STATE = "weights after step 1", "state after step 1"
SECOND_GRADIENTS = "gradients of step 2"
WEIGHTS, STATE = "weights at the end", "state at the end"

_FILE, _TENSORS = "side.json", "side.safetensors"


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
    first use in a forward.
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


def save_side(side: Side, folder: Path) -> None:
    """Writes what `load_side` reads; the folder must be there."""
    tensors = {
        f"{kind}\n{moment}\n{name}": tensor
        for kind, moments in (("tensors", side.tensors), ("rank_sums", side.rank_sums))
        for moment, named in moments.items()
        for name, tensor in named.items()
    }
    save_file(tensors | {"activations": flatten(side.activations)}, folder / _TENSORS)
    kept = {name: value for name, value in vars(side).items() if name not in ("tensors", "rank_sums", "activations")}
    kept["activations"] = [(each.name, each.start, each.rest, tuple(each.values.shape)) for each in side.activations]
    if side.collectives is not None:
        kept["collectives"] = {kind: asdict(each) for kind, each in side.collectives.items()}
    (folder / _FILE).write_text(json.dumps(kept), encoding="utf-8")


def load_side(folder: Path) -> Side:
    """The side that was written there."""
    kept = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    tensors = load_file(folder / _TENSORS)
    described = [Activation(name, at, rest, torch.empty(shape)) for name, at, rest, shape in kept.pop("activations")]
    activations = unflatten(described, tensors.pop("activations"))
    kept["unlike"] = [Unlike(*each) for each in kept["unlike"]]
    kept["cuts"] = [(start, count) for start, count in kept["cuts"]]
    if kept["collectives"] is not None:
        kept["collectives"] = {kind: Collectives(**each) for kind, each in kept["collectives"].items()}
    side = Side(**kept, activations=activations)
    for key, tensor in tensors.items():
        kind, moment, name = key.split("\n")
        getattr(side, kind).setdefault(moment, {})[name] = tensor
    return side
