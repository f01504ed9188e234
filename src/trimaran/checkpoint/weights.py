"""Weights in: pretrained tensors from safetensors into a model, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from trimaran.checkpoint.safetensors_folder import open_tensors
from trimaran.errors import CheckpointError
from trimaran.job import Weights

_MOST_NAMES_SHOWN = 10


@dataclass(frozen=True)
class LoadedWeights:
    """What was loaded: how many of the model's tensors, and what a partial load left aside."""

    num_loaded: int
    kept_first_values: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.num_loaded} tensors loaded"]
        if self.kept_first_values:
            parts.append(f"first values kept by {_some(self.kept_first_values)}")
        if self.left_out:
            parts.append(f"of the file left out: {_some(self.left_out)}")
        return "; ".join(parts)


def load_weights(model: nn.Module, weights: Weights) -> LoadedWeights:
    """Copies the file's tensors into the model's parameters and persistent buffers, in their types.

    Raises CheckpointError that lists every missing, unexpected and mis-shaped name; the model is then untouched.
    Tensors that the model ties are loaded once, under any of their names.
    """
    targets = model.state_dict()
    with open_tensors(Path(weights.path)) as reader:
        source_of, unexpected, unused_rules = _match(reader.shapes, targets, weights.rename)
        missing = _missing(targets, source_of)
        misshaped = [
            f"{name}: {_shape(reader.shapes[theirs])} in the file, {_shape(targets[name].shape)} in the model"
            for name, theirs in source_of.items()
            if reader.shapes[theirs] != tuple(targets[name].shape)
        ]
        other_kind = [
            name
            for name, theirs in source_of.items()
            if reader.is_floating_point[theirs] != targets[name].is_floating_point()
        ]
        _refuse(weights, other_kind, "of another kind (whole numbers)", "Quantised weights need their own model.")
        _refuse(weights, misshaped, "of another shape", 'Leave it out with rename={"name": None}, or change the model.')
        _refuse(weights, unused_rules, "named by rename but not in the file", "Correct the names in rename.")
        _refuse(
            weights,
            _not_allowed(missing, weights.partial),
            "missing",
            "Map its names with rename, or allow them with partial=(patterns).",
        )
        _refuse(
            weights,
            _not_allowed(unexpected, weights.partial),
            "unexpected",
            "Map them with rename (None leaves out), or allow them with partial=(patterns).",
        )
        if not source_of:
            raise CheckpointError(
                f"{weights.path} has no tensor of this model; it has {_some(list(reader.shapes))}.",
                f"The model has {_some(list(targets))}.",
                "Map names with rename.",
            )
        with torch.no_grad():
            for name, theirs in source_of.items():
                targets[name].copy_(reader.read(theirs))
    return LoadedWeights(len(source_of), tuple(missing), tuple(unexpected))


def _match(
    theirs: Mapping[str, tuple[int, ...]], targets: Mapping[str, Tensor], rename: Mapping[str, str | None]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Model name -> file name; file names without a place; rules of `rename` that nothing matched."""
    source_of: dict[str, str] = {}
    unexpected: list[str] = []
    used: set[str] = set()
    for name in theirs:
        rule = next((each for each in rename if _matches(each, name)), None)
        if rule is not None:
            used.add(rule)
        new = name if rule is None else _renamed(rule, rename[rule], name)
        if new is None:
            continue
        if new not in targets:
            unexpected.append(name)
        elif new in source_of:
            raise CheckpointError(
                f"{name} and {source_of[new]} of the file both go to {new}.",
                "A tensor of the model is loaded once.",
                "Correct the names in rename.",
            )
        else:
            source_of[new] = name
    return source_of, unexpected, [rule for rule in rename if rule not in used]


def _matches(rule: str, name: str) -> bool:
    head, star, tail = rule.partition("*")
    if not star:
        return name == rule
    return name.startswith(head) and name.endswith(tail) and len(name) >= len(head) + len(tail)


def _renamed(rule: str, new: str | None, name: str) -> str | None:
    if new is None or "*" not in rule:
        return new
    head, _, tail = rule.partition("*")
    return new.replace("*", name[len(head) : len(name) - len(tail)])


def _missing(targets: Mapping[str, Tensor], source_of: Mapping[str, str]) -> list[str]:
    """Names without a source, except those tied to one that has one."""
    filled = {(targets[name].data_ptr(), targets[name].shape) for name in source_of}
    return [
        name
        for name, tensor in targets.items()
        if name not in source_of and (tensor.numel() == 0 or (tensor.data_ptr(), tensor.shape) not in filled)
    ]


def _not_allowed(names: Sequence[str], allowed: bool | Sequence[str]) -> list[str]:
    patterns = ("*",) if allowed is True else allowed or ()
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _refuse(weights: Weights, names: Sequence[str], what: str, remedy: str) -> None:
    if names:
        raise CheckpointError(
            f"{len(names)} tensors of {weights.path} are {what}: {_some(names)}.",
            "Weights fit the model name by name.",
            remedy,
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES_SHOWN])
    return shown + (f" and {len(names) - _MOST_NAMES_SHOWN} more" if len(names) > _MOST_NAMES_SHOWN else "")


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"
