"""A verification as a person reads it, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trimaran.prove.verify_compare import Row, Verification
from trimaran.units import format_bytes, format_count

_KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
}


def render_verification(verification: Verification) -> str:
    """Lines: what was compared, a table, the first difference, traffic, and what could not be compared."""
    return "\n".join(_lines(verification))


def render_line(verification: Verification) -> str:
    """One line: equal, or the first thing that differs."""
    if verification.difference is None:
        worst = max((row.excess for row in verification.rows if row.status == "passed"), default=0.0)
        return f"equal    {verification.layout}  (off by {worst:.1e} at most)"
    found = verification.difference
    cause = f"; {found.cause}" if found.cause else ""
    return f"differs  {verification.layout}  {found.tensor}: {found.what}, off by {_off(found.excess)}{cause}"


def verification_as_json(verification: Verification) -> dict[str, Any]:
    """Plain values; a figure that is no number, or has none, is null."""
    found = verification.difference
    return {
        "job": verification.job,
        "layout": verification.layout,
        "against": verification.against,
        "ranks": verification.num_ranks,
        "steps": verification.steps,
        "equal": verification.equal,
        "rows": [_row_as_json(row) for row in verification.rows],
        "difference": None if found is None else vars(found) | {"excess": _finite(found.excess)},
        "collectives": None
        if verification.collectives is None
        else {kind: {"count": each.count, "bytes": each.num_bytes} for kind, each in verification.collectives.items()},
        "not_compared": list(verification.not_compared),
    }


def _lines(verification: Verification) -> Iterator[str]:
    of = verification
    yield f"{of.job} · {format_count(of.num_parameters)} parameters · {of.steps} steps of {of.global_batch} samples"
    yield f"layout   {of.layout:<40} {_processes(of.num_ranks)}"
    yield f"against  {of.against:<40} {_processes(of.num_reference_ranks)}"
    yield ""
    names = max(len(row.name) for row in of.rows)
    worsts = max(5, *(len(row.worst) for row in of.rows))
    yield f"{'':<9}{'compared':<{names}}  {'worst':<{worsts}}  {'off by':>8}  allowed"
    for row in of.rows:
        figures = f"{_off(row.excess):>8}  {_off(row.allowed)}"
        yield f"{row.status:<9}{row.name:<{names}}  {row.worst or '-':<{worsts}}  {figures}"
    yield ""
    if of.difference is None:
        yield "equal    the layout computes what its reference computes"
    else:
        found = of.difference
        yield f"differs  first in {found.tensor}: {found.what}, off by {_off(found.excess)}"
        if found.cause:
            yield f"cause    {found.cause}"
    if of.collectives is not None:
        yield f"traffic  per step and process: {_describe_traffic(of)}"
    for text in of.not_compared:
        yield f"beside   {text}"


def _describe_traffic(verification: Verification) -> str:
    counts: dict[str, tuple[int, int]] = {}
    for kind, each in (verification.collectives or {}).items():
        name = next((name for start, name in _KINDS.items() if kind.startswith(start)), kind)
        count, num_bytes = counts.get(name, (0, 0))
        counts[name] = (count + each.count, num_bytes + each.num_bytes)
    told = [f"{count} {name} ({format_bytes(num_bytes)})" for name, (count, num_bytes) in counts.items()]
    return ", ".join(told) or "none"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _off(value: float) -> str:
    if math.isinf(value):
        return "unlike"
    return "0" if not value else f"{value:.1e}"


def _row_as_json(row: Row) -> dict[str, Any]:
    return vars(row) | {"excess": _finite(row.excess)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
