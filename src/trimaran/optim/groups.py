"""Parameter groups, chosen by name and by the whole tensor's shape, so that no sharding changes them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trimaran.errors import OptimizerError
from trimaran.optim.checks import is_number, nearest

Overrides = Mapping[str, Mapping[str, Any]]


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    described_lr: float,
    weight_decay: float | None,
    no_decay: Sequence[str],
    overrides: Overrides,
) -> list[dict[str, Any]]:
    """Torch parameter groups of the parameters that require a gradient, in the order of the names.

    Weights of two dimensions and more decay; biases, norms and what `no_decay` matches do not (`weight_decay` None:
    the optimizer has none). The first glob of `overrides` that matches a name has the last word; its "lr_scale"
    multiplies the rate, its "lr" stands beside `described_lr` and is scaled with it. Each group keeps "names" and
    "base_lr", the rate before the schedule. Raises OptimizerError for globs without effect and for nothing to train.
    """
    named = list(named_parameters)
    names = [name for name, _ in named]
    _refuse_idle_globs("no_decay", no_decay, names)
    winners = {name: _first_match(overrides, name) for name in names}
    _refuse_idle_globs("groups", overrides, names)
    _refuse_shadowed_globs(overrides, winners)

    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        options: dict[str, Any] = {}
        if weight_decay is not None:
            options["weight_decay"] = float(weight_decay) if _decays(name, parameter, no_decay) else 0.0
        options |= overrides.get(winners[name] or "", {})
        options["lr"] = _group_rate(options.pop("lr_scale", 1.0), options.pop("lr", None), lr, described_lr)
        key = repr(sorted(options.items()))
        group = groups.setdefault(key, {"params": [], "names": [], "base_lr": options["lr"], **options})
        group["params"].append(parameter)
        group["names"].append(name)
    if not groups:
        raise OptimizerError(
            f"None of the model's {len(named)} parameters requires a gradient.",
            "An optimizer trains what requires one.",
            "Leave requires_grad at True for some of them, or check that the model holds parameters at all.",
        )
    return list(groups.values())


def check_groups(name: str, no_decay: Sequence[str], overrides: Overrides, known: Iterable[str]) -> None:
    """Raises OptimizerError for overrides of options that the optimizer does not have, and for no list of globs."""
    if isinstance(no_decay, str):
        raise OptimizerError(
            f"{name}(no_decay={no_decay!r}) is a string.", "It is a list of globs.", f"Write no_decay=({no_decay!r},)."
        )
    if not isinstance(overrides, Mapping) or not all(isinstance(options, Mapping) for options in overrides.values()):
        raise OptimizerError(
            f"{name}(groups={overrides!r}).",
            "Groups map a glob over parameter names to the options it sets.",
            'Write, for example, groups={"head.*": {"lr_scale": 10.0}}.',
        )
    allowed = ["lr_scale", "lr", *known]
    for glob, options in overrides.items():
        for option in options:
            if option not in allowed:
                raise OptimizerError(
                    f"{name}(groups={{{glob!r}: ...}}) sets {option!r}.",
                    f"A group of {name} can set: {', '.join(allowed)}.",
                    nearest(option, allowed),
                )
        if {"lr", "lr_scale"} <= options.keys():
            raise OptimizerError(
                f"{name}(groups={{{glob!r}: ...}}) sets both lr and lr_scale.",
                "lr is the group's own rate, lr_scale a multiple of everyone's.",
                "Keep one of them.",
            )
        for option in {"lr", "lr_scale"} & options.keys():
            value = options[option]
            if not is_number(value) or not 0 < value < math.inf:
                raise OptimizerError(
                    f"{name}(groups={{{glob!r}: {{{option!r}: {value!r}}}}}).",
                    "A learning rate is above 0.",
                    "Give a positive number; to freeze parameters set requires_grad=False on them in the model.",
                )


def _group_rate(lr_scale: float, own_lr: float | None, lr: float, described_lr: float) -> float:
    return lr * lr_scale if own_lr is None else own_lr * (lr / described_lr)


def _decays(name: str, parameter: nn.Parameter, no_decay: Sequence[str]) -> bool:
    return parameter.dim() >= 2 and not any(fnmatchcase(name, glob) for glob in no_decay)


def _first_match(globs: Iterable[str], name: str) -> str | None:
    return next((glob for glob in globs if fnmatchcase(name, glob)), None)


def _refuse_idle_globs(option: str, globs: Iterable[str], names: Sequence[str]) -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            close = difflib.get_close_matches(glob, names, n=3, cutoff=0.0)
            raise OptimizerError(
                f"{glob!r} in {option} matches no parameter.",
                "A glob is matched against whole parameter names; * stands for anything, dots too.",
                f"Nearest names: {', '.join(close)}." if close else "The model has no parameters.",
            )


def _refuse_shadowed_globs(overrides: Overrides, winners: Mapping[str, str | None]) -> None:
    for glob in overrides:
        if glob not in winners.values():
            taken = next(winner for name, winner in winners.items() if fnmatchcase(name, glob))
            raise OptimizerError(
                f"{glob!r} in groups has no effect: {taken!r} before it takes what it matches.",
                "The first glob that matches a name decides.",
                f"Move {glob!r} before {taken!r}, or drop it.",
            )
