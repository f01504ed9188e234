"""The audit: what several ranks hold in common is bit-equal on all of them (invariant 8)."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

from trimaran.checkpoint import StateNames
from trimaran.checkpoint.parts import local_part, sharded_axes
from trimaran.errors import NumericsError
from trimaran.run.agree import digest
from trimaran.world.groups import World


def audit_replicas(world: World, names: StateNames, step: int) -> None:
    """Compares parameters, saved buffers and optimizer state between the ranks that hold the same of them.

    Every rank must call it, after the same step. Raises NumericsError on all of them for the first difference, which
    names the tensor and the rank that is alone with its value, or the later one of two.
    """
    holders = cache(world.ranks_beside)
    found = {
        name: (digest(local_part(tensor)[0]), holders(sharded_axes(tensor)))
        for name, tensor in names.collect().tensors.items()
    }
    told = [
        json.loads(text) for text in world.gather_text(json.dumps({name: each for name, (each, _) in found.items()}))
    ]
    difference = ""
    for name, (_, ranks) in found.items():
        counts = Counter(told[rank][name] for rank in ranks)
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            other = next(rank for rank in ranks if told[rank][name] != usual)
            difference = f"{name} on rank {other} differs from that on rank {next(r for r in ranks if r != other)}"
            break
    first = next((each for each in world.gather_text(difference) if each), "")
    if first:
        raise NumericsError(
            f"{first} after step {step}.",
            "What ranks hold in common is bit-equal on all of them.",
            "Start again: the run continues from its last checkpoint. Where it happens again, suspect that rank's "
            "memory or links, or a model that draws from a generator of its own.",
        )
