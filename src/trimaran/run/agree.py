"""Before step 1: all ranks compare what they resolved, and the first difference is named."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trimaran.errors import RunError
from trimaran.run.directory import find_difference
from trimaran.world.groups import World

Result = TypeVar("Result")


def on_first_rank(world: World, action: Callable[[], Result]) -> Result | None:
    """What `action` gives on rank 0, which alone runs it; None elsewhere. Every rank must call it.

    A RunError that it raises, or what the system refuses, is raised on every rank, so that all end alike and it is told
    once.
    """
    result, refusal = None, ""
    if world.rank == 0:
        try:
            result = action()
        except RunError as error:
            refusal = json.dumps([error.value, error.rule, error.remedy])
        except OSError as problem:
            refusal = json.dumps(
                [
                    f"{problem.filename or 'the run directory'} cannot be used: {problem.strerror or problem}.",
                    "A run keeps its records in a directory of its own.",
                    "Make room on that disk or make it writable, and start again; or choose another --run.",
                ]
            )
    if told := world.gather_text(refusal)[0]:
        raise RunError(*json.loads(told))
    return result


def agree_on_job(world: World, resolved: Mapping[str, Any]) -> None:
    """Raises RunError on every rank where a rank's resolved job differs from rank 0's. Every rank must call it."""
    of_ranks = [json.loads(text) for text in world.gather_text(json.dumps(resolved, default=str))]
    for rank, theirs in enumerate(of_ranks):
        found = find_difference(of_ranks[0], theirs)
        if found is None:
            continue
        name, first, other = found
        raise RunError(
            f"rank 0 has {name}={first} and rank {rank} has {name}={other}.",
            "All ranks of a run train one job.",
            "Start every rank with the same command, the same files and the same versions.",
        )


def agree_on_weights(world: World, model: nn.Module) -> None:
    """Raises RunError on every rank where a first weight differs between ranks, naming it. Every rank must call it."""
    if world.size == 1:
        return
    digests = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    for rank, text in enumerate(texts := world.gather_text(json.dumps(digests))):
        if text == texts[0]:
            continue
        found = find_difference(json.loads(texts[0]), json.loads(text))
        assert found is not None
        raise RunError(
            f"{found[0]} has other first values on rank {rank} than on rank 0.",
            "First weights are a function of the seed alone.",
            "Draw them from torch's, numpy's or Python's default generator, not from one seeded by time or rank.",
        )


def digest(tensor: Tensor) -> int:
    """A number that tells a tensor's bits, in whatever strides they lie."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
