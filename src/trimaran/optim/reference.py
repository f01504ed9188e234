"""Any optimizer class, by reference."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimaran.errors import OptimizerError
from trimaran.job import OptimizerBuilder, ScaledRate
from trimaran.optim.checks import is_number, nearest
from trimaran.optim.describing import describe_call
from trimaran.optim.groups import Overrides, check_groups, parameter_groups
from trimaran.optim.optimizers import start_momentum
from trimaran.optim.rates import Rule, check_rate, scaled_rate


def by_reference(
    cls: type[torch.optim.Optimizer],
    lr: float,
    *,
    at_batch: int | None = None,
    rule: Rule | None = None,
    no_decay: Sequence[str] = (),
    groups: Overrides | None = None,
    **options: Any,
) -> OptimizerBuilder:
    """Any optimizer class with the interface of torch.optim, built with lr and the further options as keywords.

    `rule` says how its rate follows the batch; there is no rule that suits every class. Parameter groups as in
    `adamw`, decay where the class takes weight_decay. A class whose step wants a closure, such as LBFGS, cannot be
    used. Raises OptimizerError for what is no such class and for options that it does not take.
    """
    _check_class(cls)
    check_rate("by_reference", lr, at_batch, rule)
    taken = _keywords(cls)
    _check_options(cls, taken, options)
    known = [name for name in {**taken, **options} if name != "lr"]
    check_groups("by_reference", no_decay, groups or {}, known)
    if no_decay and "weight_decay" not in known:
        raise OptimizerError(
            f"by_reference({cls.__name__}, no_decay={no_decay!r}).",
            f"{cls.__name__} takes no weight_decay.",
            "Drop no_decay.",
        )
    return _ByReference(cls, lr, options, no_decay, groups or {}, at_batch, rule)


@dataclass(frozen=True)
class _ByReference:
    cls: Any
    lr: float
    options: Mapping[str, Any]
    no_decay: Sequence[str]
    groups: Overrides
    at_batch: int | None
    rule: Rule | None

    def rate(self, global_batch: int, /) -> ScaledRate:
        return scaled_rate(self.lr, at_batch=self.at_batch, rule=self.rule, global_batch=global_batch)

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float, /) -> torch.optim.Optimizer:
        groups = parameter_groups(
            named_parameters,
            lr=lr,
            described_lr=self.lr,
            weight_decay=self._weight_decay(),
            no_decay=self.no_decay,
            overrides=self.groups,
        )
        try:
            optimizer: torch.optim.Optimizer = self.cls(groups, lr=lr, **self.options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise OptimizerError(
                f"{self.cls.__name__} refused its options: {error}",
                "An optimizer by reference is built by its own class, with lr and the options given.",
                "Correct the options of tm.optim.by_reference.",
            ) from error
        _start_fused_momentum(optimizer)
        return optimizer

    def describe(self) -> str:
        shared = {"no_decay": self.no_decay, "groups": self.groups, "at_batch": self.at_batch, "rule": self.rule}
        return describe_call(_path(self.cls), {"lr": self.lr, **self.options, **shared})

    def _weight_decay(self) -> float | None:
        """The decay of weights that decay; None where the class has no such option."""
        default = _keywords(self.cls).get("weight_decay")
        value = self.options.get("weight_decay", default and default.default)
        return float(value) if is_number(value) else None


def _start_fused_momentum(optimizer: torch.optim.Optimizer) -> None:
    """What `start_momentum` says holds for a fused SGD by reference too; dampening would make its zeros a change."""
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.defaults["fused"]:
        return
    if any(group["dampening"] for group in optimizer.param_groups):
        raise OptimizerError(
            "by_reference(torch.optim.SGD, fused=True, dampening=...).",
            "A fused SGD starts from a momentum of zeros, so that a skipped first step leaves it in order; "
            "dampening would shrink its first step.",
            "Drop fused=True.",
        )
    start_momentum(optimizer)


def _keywords(cls: type[torch.optim.Optimizer]) -> dict[str, inspect.Parameter]:
    """The keywords of the constructor; its first argument is the parameters."""
    return dict(list(inspect.signature(cls).parameters.items())[1:])


def _check_class(cls: Any) -> None:
    rule = "It takes a class with the interface of torch.optim, which is built once the weights exist."
    example = "tm.optim.by_reference(torch.optim.RMSprop, lr=...)"
    if isinstance(cls, torch.optim.Optimizer):
        name = type(cls).__name__
        raise OptimizerError(
            f"by_reference was given an instance of {name}.",
            rule,
            f"Give the class and its options: tm.optim.by_reference({name}, lr=...).",
        )
    if not isinstance(cls, type) or not hasattr(cls, "step") or not hasattr(cls, "state_dict"):
        raise OptimizerError(f"by_reference was given {cls!r}.", rule, f"Write, for example, {example}.")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptimizerError(
            f"{cls.__name__}.step needs a closure.",
            "A step has one forward and one backward of each micro-batch; the optimizer does not ask for more.",
            "Take an optimizer whose step needs none.",
        )


def _check_options(cls: type, taken: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    for option in ("lr", *options):
        if option not in taken and not passes_on:
            raise OptimizerError(
                f"{cls.__name__} takes no {option!r}.",
                f"It takes: {', '.join(taken)}.",
                "Take a class with a learning rate." if option == "lr" else nearest(option, taken),
            )
    try:
        inspect.signature(cls).bind([], lr=1.0, **options)
    except TypeError as error:
        raise OptimizerError(
            f"{cls.__name__} cannot be built so: {error}.",
            "by_reference passes the parameters, lr and the options given.",
            "Give what is missing as a keyword of by_reference.",
        ) from None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
