"""One optimizer update from summed gradients: unscale, clip, skip what is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_update(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], norm: Tensor, factor: Tensor) -> None:
    """Steps the optimizer on `factor` times the gradients; changes nothing where `norm` is not finite (invariant 7).

    Fused optimizers take the factor into their kernel, which saves a pass over the gradients. Fused Adam also takes
    the decision to skip, so that no value travels to the host; the others are asked on the host, once per step.
    """
    if not _scales_in_kernel(optimizer, gradients):
        if torch.isfinite(norm):
            torch._foreach_mul_(list(gradients), factor.to(gradients[0].dtype.to_real()))
            optimizer.step()
        return
    decides_in_kernel = isinstance(optimizer, torch.optim.Adam)
    try:
        # A kernel that scales writes every gradient back. On a CPU a look costs nothing, and may save that.
        unscaled = norm.device.type == "cpu" and bool(factor == 1)
        optimizer.grad_scale = None if unscaled else (1.0 / factor).float()  # type: ignore[attr-defined]
        if decides_in_kernel:
            optimizer.found_inf = torch.isfinite(norm).logical_not().float()  # type: ignore[attr-defined]
        # Fused SGD would skip too, but a skip at its first step leaves its momentum uninitialised.
        if decides_in_kernel or torch.isfinite(norm):
            optimizer.step()
    finally:
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]


def _scales_in_kernel(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> bool:
    # The first is torch's own word for it. The kernels read the scale as float32, which would round a float64 update.
    takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return takes_scale and fused and all(gradient.dtype is torch.float32 for gradient in gradients)
