"""The repeated blocks of a model: what is recomputed, compiled and sharded piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trimaran.engine.buffers import unchanged_buffers
from trimaran.errors import JobError
from trimaran.layout import Recompute

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default),
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Selective recompute keeps what these give: they take nearly all of the time, and few of the bytes."""


def find_blocks(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    """Name -> block, in the model's order: the modules that `Job.blocks` names, or the entries of its lists of modules.

    A `*` of the pattern stands for one part of a dotted name. Without a pattern these are the entries of the outermost
    `ModuleList`s; a model that has none has no blocks. Raises JobError for a pattern that names no module, or blocks
    that lie in each other.
    """
    if pattern is None:
        return _entries_of_lists(model)
    blocks = {name: module for name, module in model.named_modules() if name and _matches(name, pattern)}
    if not blocks:
        known = ", ".join(name for name, _ in model.named_children())
        raise JobError(
            f"blocks={pattern!r} names no module of {type(model).__name__}.",
            "Blocks are the model's repeated parts; a * stands for one part of a dotted name.",
            f"Name them as in model.named_modules(); its parts are: {known}.",
        )
    for name in blocks:
        inside = next((other for other in blocks if name.startswith(f"{other}.")), None)
        if inside is not None:
            raise JobError(
                f"blocks={pattern!r} names {inside} and {name}, which lies in it.",
                "Blocks follow each other; none lies in another.",
                "Name the outer or the inner ones.",
            )
    return blocks


def apply_recompute(blocks: Mapping[str, nn.Module], mode: Recompute) -> None:
    """Each block's activations are dropped after its forward and computed again in its backward, in place.

    "full" keeps a block's input alone; "selective" also what its matrix products and attention gave (Korthikanti et
    al. 2022, arXiv 2205.05198, section 5, turned round: there attention is what is recomputed). The second run draws
    the same random numbers and leaves buffers as the first left them.
    """
    for block in blocks.values():
        contexts = partial(_contexts, block, selective=mode == "selective")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def apply_compile(blocks: Mapping[str, nn.Module]) -> None:
    """Each block is compiled by torch.compile when it first runs, in place; equal blocks share the work."""
    for block in blocks.values():
        block.compile()


def _contexts(block: nn.Module, *, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a block's first and second forward run in."""
    first, second = create_selective_checkpoint_contexts(_keeps) if selective else (nullcontext(), nullcontext())
    has_buffers = any(True for _ in block.buffers())
    return first, _both(unchanged_buffers(block), second) if has_buffers else second


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _keeps(context: object, operation: object, *arguments: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _entries_of_lists(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            found |= {f"{name}.{index}" if name else index: block for index, block in module.named_children()}
    return found


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
