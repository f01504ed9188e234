"""Which layouts a job is verified in: the one that is asked for, its reference, or all that so many ranks allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from trimaran import layout as layouts
from trimaran.errors import LayoutError, UsageError
from trimaran.job import Job
from trimaran.layout import Layout, ResolvedLayout

DEFAULT_STEPS = 5


def choose_steps(job: Job, steps: int | None) -> int:
    """So many steps of the job's run; without a wish a few. Raises UsageError for none, and for more than it has."""
    if steps is None:
        return min(DEFAULT_STEPS, job.total_steps)
    if not 1 <= steps <= job.total_steps:
        raise UsageError(
            f"steps={steps}.",
            f"They are the first of the job's own {job.total_steps}, under its schedule.",
            f"Give 1 to {job.total_steps}.",
        )
    return steps


def parse_layout(text: str | Layout) -> Layout:
    """The layout; where its text names no precision, in float64, which shows any fault that is not rounding."""
    if isinstance(text, Layout):
        return text
    named = re.search(r"\bprecision\s*=", text)
    return Layout.parse(text if named else f"{text} precision=fp64")


def count_ranks(layout: Layout) -> int:
    """As many as the layout needs; where dp is left out, one copy of the model."""
    return (layout.dp or 1) * layout.tp * layout.pp


def resolve(layout: Layout, job: Job, *, num_ranks: int | None = None) -> ResolvedLayout:
    """The layout on as many ranks as it needs, or on so many. Raises LayoutError where they do not fit."""
    num_ranks = count_ranks(layout) if num_ranks is None else num_ranks
    return layout.resolve(world_size=num_ranks, global_batch=job.global_batch)


def choose_reference(against: str | Layout, layout: ResolvedLayout, job: Job) -> ResolvedLayout:
    """What a layout is compared with: by default one process with the whole batch at once, at the same precision.

    Raises LayoutError where the precisions differ.
    """
    named = isinstance(against, Layout) or re.search(r"\bprecision\s*=", against)
    found = parse_layout(against) if named else Layout.parse(f"{against} precision={layout.precision}")
    if found.precision != layout.precision:
        raise LayoutError(
            f"precision={layout.precision} against precision={found.precision}.",
            "Equality is promised at one precision.",
            f"Leave precision out of --against, or write precision={layout.precision}.",
        )
    return resolve(found, job)


def cut_alike(reference: ResolvedLayout, layout: ResolvedLayout, job: Job) -> ResolvedLayout:
    """The reference with the layout's micro-batch, for models whose batch statistics depend on the cut."""
    return resolve(replace(reference, micro_batch=layout.micro_batch), job)


def enumerate_layouts(job: Job, *, num_ranks: int, precision: str = "fp64") -> list[Layout]:
    """All layouts of the axes that are built, on exactly so many ranks.

    Every dp × tp with every zero, shard and sp, each with the share of a rank in one piece and in several; and every
    dp × tp at its highest zero with each kind of recompute. compile is left out: it takes minutes. A job without a
    tp_plan has no tp.
    """
    found: dict[str, Layout] = {}
    for dp, tp in _degrees(job, num_ranks):
        share = -(-job.global_batch // dp)
        micro_batches = [None, max(1, -(-share // 3))] if share > 1 else [None]
        plain = {"dp": dp, "tp": tp, "precision": precision}
        last: dict[str, object] = {}
        for sharding, sp, micro_batch in product(_shardings(dp), _switches("sp", on=tp > 1), micro_batches):
            last = sharding | {"sp": sp, "micro_batch": micro_batch}
            _add(found, plain | last)
        for recompute in ("selective", "full") if "recompute" in layouts._BUILT else ():
            _add(found, plain | last | {"recompute": recompute})
    return list(found.values())


def _degrees(job: Job, num_ranks: int) -> Iterator[tuple[int, int]]:
    for tp in range(1, num_ranks + 1):
        if num_ranks % tp == 0 and (tp == 1 or ("tp" in layouts._BUILT and job.tp_plan)):
            yield num_ranks // tp, tp


def _shardings(dp: int) -> list[dict[str, object]]:
    if dp == 1 or "zero" not in layouts._BUILT:
        return [{"zero": 0}]
    groups: list[int | None] = [None]
    if "shard" in layouts._BUILT:
        groups += [size for size in range(2, dp) if dp % size == 0]
    found: list[dict[str, object]] = [{"zero": 0}]
    for shard, zero in product(groups, (1, 2, 3)):
        found.append({"zero": zero, "shard": shard})
    return found


def _switches(axis: str, *, on: bool) -> tuple[bool, ...]:
    return (False, True) if on and axis in layouts._BUILT else (False,)


def _add(found: dict[str, Layout], values: dict[str, object]) -> None:
    layout = replace(Layout(), **values)  # type: ignore[arg-type]
    found.setdefault(str(layout), layout)
