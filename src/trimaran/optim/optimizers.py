"""AdamW and SGD, fused where torch has that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from trimaran.errors import OptimizerError
from trimaran.job import ScaledRate
from trimaran.optim.checks import check_number, is_number
from trimaran.optim.describing import describe_call
from trimaran.optim.groups import Overrides, check_groups, parameter_groups
from trimaran.optim.rates import Rule, check_rate, scaled_rate

# mps has fused kernels too, left out until a test runs on them.
_FUSED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class adamw:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); its rate grows with the square root of the batch.

    lr is the rate at a global batch of `at_batch` samples; without at_batch it is never scaled. Weights of two
    dimensions and more decay by weight_decay; biases, norms and names matching a glob of no_decay do not.
    groups={"glob": {...}} sets lr_scale (a multiple), lr (the group's own, also at at_batch), or any of betas, eps
    and weight_decay for the names it matches; the first match decides. Raises OptimizerError for values outside
    their range.
    """

    lr: float
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    no_decay: Sequence[str] = ()
    groups: Overrides = field(default_factory=dict)
    at_batch: int | None = None
    rule: Rule | None = "sqrt"

    def __post_init__(self) -> None:
        check_rate("adamw", self.lr, self.at_batch, self.rule)
        check_groups("adamw", self.no_decay, self.groups, self._own_options())
        for options in ({}, *self.groups.values()):
            _check_adamw(self._own_options() | dict(options))

    def rate(self, global_batch: int, /) -> ScaledRate:
        """The learning rate at this global batch, and how it came about."""
        return scaled_rate(self.lr, at_batch=self.at_batch, rule=self.rule, global_batch=global_batch)

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float, /) -> torch.optim.AdamW:
        """torch's AdamW over the parameters that require a gradient, at rate `lr`. Raises OptimizerError."""
        groups = _groups(self, named_parameters, lr)
        return torch.optim.AdamW(groups, lr=lr, **self._own_options(), fused=_can_be_fused(groups))

    def describe(self) -> str:
        """All options in one line, the same in every run of the same job."""
        return describe_call("adamw", _options(self))

    def _own_options(self) -> dict[str, Any]:
        return {"betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class sgd:
    """Stochastic gradient descent with momentum; its rate grows linearly with the batch.

    lr, at_batch, no_decay and groups as in `adamw`; a group may set momentum, nesterov and weight_decay. The decay is
    torch's: weight_decay times the weight is added to the gradient. Raises OptimizerError for values outside their
    range.
    """

    lr: float
    _: KW_ONLY
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    groups: Overrides = field(default_factory=dict)
    at_batch: int | None = None
    rule: Rule | None = "linear"

    def __post_init__(self) -> None:
        check_rate("sgd", self.lr, self.at_batch, self.rule)
        check_groups("sgd", self.no_decay, self.groups, self._own_options())
        for options in ({}, *self.groups.values()):
            _check_sgd(self._own_options() | dict(options))

    def rate(self, global_batch: int, /) -> ScaledRate:
        """The learning rate at this global batch, and how it came about."""
        return scaled_rate(self.lr, at_batch=self.at_batch, rule=self.rule, global_batch=global_batch)

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float, /) -> torch.optim.SGD:
        """torch's SGD over the parameters that require a gradient, at rate `lr`. Raises OptimizerError."""
        groups = _groups(self, named_parameters, lr)
        optimizer = torch.optim.SGD(groups, lr=lr, **self._own_options(), fused=_can_be_fused(groups))
        start_momentum(optimizer)
        return optimizer

    def describe(self) -> str:
        """All options in one line, the same in every run of the same job."""
        return describe_call("sgd", _options(self))

    def _own_options(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.weight_decay}


def start_momentum(optimizer: torch.optim.SGD) -> None:
    """Gives every parameter with momentum a buffer of zeros; its first step is then the same as without a buffer.

    Left to itself the fused kernel allocates the buffers in its first step without filling them; where that step is
    skipped (`found_inf`) they keep whatever the memory held, and the next step adds it to the weights.
    """
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _groups(
    builder: adamw | sgd, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float
) -> list[dict[str, Any]]:
    return parameter_groups(
        named_parameters,
        lr=lr,
        described_lr=builder.lr,
        weight_decay=builder.weight_decay,
        no_decay=builder.no_decay,
        overrides=builder.groups,
    )


def _can_be_fused(groups: Iterable[Mapping[str, Any]]) -> bool:
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(p.is_floating_point() and p.device.type in _FUSED_DEVICES for p in parameters)


def _options(builder: adamw | sgd) -> dict[str, Any]:
    return {item.name: getattr(builder, item.name) for item in fields(builder)}


def _check_adamw(options: Mapping[str, Any]) -> None:
    betas = options["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise OptimizerError(
            f"adamw(betas={betas!r}).",
            "They are the decay rates of two running means, each from 0 to below 1.",
            "Give, for example, betas=(0.9, 0.95).",
        )
    check_number("adamw", "eps", options["eps"], rule="It is added to a root, and not negative.", example=1e-8)
    _check_decay("adamw", options)


def _check_sgd(options: Mapping[str, Any]) -> None:
    check_number(
        "sgd",
        "momentum",
        options["momentum"],
        below=1.0,
        rule="It is the share of the last update that is kept, from 0 to below 1.",
        example=0.9,
    )
    if options["nesterov"] and not options["momentum"]:
        raise OptimizerError(
            "sgd(nesterov=True, momentum=0.0).", "Nesterov's step looks ahead along the momentum.", "Give momentum=0.9."
        )
    _check_decay("sgd", options)


def _check_decay(name: str, options: Mapping[str, Any]) -> None:
    rule = "Weights decay towards 0, or not at all."
    check_number(name, "weight_decay", options["weight_decay"], rule=rule, example=0.1)
