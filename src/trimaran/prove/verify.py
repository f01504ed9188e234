"""Is a layout the same as one process? Both run a few steps on the same samples, and all that they give is compared."""

from __future__ import annotations

from collections.abc import Callable

from trimaran.errors import UsageError
from trimaran.job import Job
from trimaran.layout import Layout, ResolvedLayout
from trimaran.options import Device
from trimaran.prove.verify_compare import Verification, compare
from trimaran.prove.verify_layouts import choose_reference, choose_steps, cut_alike, parse_layout, resolve_alone
from trimaran.prove.verify_run import run_side
from trimaran.prove.verify_side import Side
from trimaran.world.environment import WorkerEnvironment, discover
from trimaran.world.groups import close_world, open_world

# Ranks do the same work: one that keeps the others waiting for longer has been lost.
_TIMEOUT_SECONDS = 120.0

RunSide = Callable[[ResolvedLayout], Side]
"""Runs a layout on ranks of its own and returns what it gave."""


def verify_job(
    job: Job,
    layout: Layout | str = "",
    *,
    against: Layout | str = "",
    steps: int | None = None,
    device: Device = "auto",
) -> Verification | None:
    """Compares a job's first steps in a layout with those of one process: `.equal`, or `.difference` says in what.

    Started alone, the layout is one of one process, such as "micro_batch=2"; under torchrun or srun every process must
    call it, and rank 0 gets the result, the others None. A text without a precision means float64. `against` is another
    layout of one process. `trimaran verify` starts the processes of both sides itself.
    Raises UsageError, LayoutError or JobError for what cannot be compared.
    """
    environment = discover()
    world_size = environment.world_size if environment else 1
    resolved = resolve_alone(parse_layout(layout), job, num_ranks=world_size)
    reference = choose_reference(against, resolved, job)
    if reference.dp * reference.tp * reference.pp > 1:
        raise UsageError(
            f"against={str(against)!r} is a layout of several processes.",
            "Here the reference runs on rank 0 alone.",
            "Use trimaran verify, which starts the processes of both sides.",
        )
    count = choose_steps(job, steps)
    side = run_on_ranks(job, resolved, environment, steps=count, device=device)
    if environment is not None and environment.rank > 0:
        return None

    def alone(each: ResolvedLayout) -> Side:
        return run_on_ranks(job, each, None, steps=count, device=device)

    return compare_with(side, job, resolved, reference, alone, recut=not against)


def compare_with(
    side: Side, job: Job, layout: ResolvedLayout, reference: ResolvedLayout, run: RunSide, *, recut: bool
) -> Verification:
    """Runs the reference and compares. `recut`: for a model with batch statistics it is cut like the side."""
    if side.batch_norms and recut:
        reference = cut_alike(reference, layout, job)
    return compare(side, run(reference))


def run_on_ranks(
    job: Job, layout: ResolvedLayout, environment: WorkerEnvironment | None, *, steps: int, device: Device
) -> Side:
    """One side on the processes that were started for it, all of which must call it."""
    world = open_world(environment, layout, device=device, timeout_seconds=_TIMEOUT_SECONDS)
    try:
        return run_side(job, layout, world, steps=steps)
    finally:
        close_world()
