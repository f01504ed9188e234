"""Is a layout the same as one process? Both run a few steps on the same samples, and all that they give is compared."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from trimaran.errors import UsageError
from trimaran.job import Job
from trimaran.layout import Layout, ResolvedLayout
from trimaran.options import Device
from trimaran.prove.verify_compare import Verification, compare, refuse_other_cut
from trimaran.prove.verify_layouts import choose_reference, choose_steps, count_ranks, cut_alike, parse_layout, resolve
from trimaran.prove.verify_run import run_side
from trimaran.prove.verify_side import Side
from trimaran.world.environment import WorkerEnvironment, discover
from trimaran.world.groups import close_world, open_own_store, open_world

# Ranks do the same work: one that keeps the others waiting for longer has been lost.
_TIMEOUT_SECONDS = 120.0
# While rank 0 runs a reference by itself the others have nothing to do; that it is gone they notice at once.
_PATIENCE = timedelta(hours=24)


class Ranks:
    """The processes of a verification. Each side runs on the first of them, as many as it needs.

    All of them make it and call the same methods in the same order. `environment` None: there is this process alone.
    """

    def __init__(self, job: Job, environment: WorkerEnvironment | None, *, steps: int, device: Device) -> None:
        self.rank = environment.rank if environment else 0
        self._job = job
        self._environment = environment
        self._steps = steps
        self._device: Device = device
        self._store = None if environment is None else open_own_store(environment, _TIMEOUT_SECONDS)
        self._num_turns = 0
        self._references: dict[ResolvedLayout, Side | None] = {}

    def verify(self, layout: ResolvedLayout, reference: ResolvedLayout, *, recut: bool) -> Verification | None:
        """Runs both sides and compares them: the result on rank 0, None on the others.

        A reference serves many layouts, and runs once. `recut`: for a model with batch statistics it is cut like the
        layout. Raises LayoutError where that cannot be.
        """
        side = self._run(layout)
        if side is not None and side.batch_norms:
            reference = cut_alike(reference, layout, self._job) if recut else reference
            refuse_other_cut(side, reference)
        if reference not in self._references:
            self._references[reference] = self._run(reference)
        other = self._references[reference]
        return compare(side, other) if side is not None and other is not None and self.rank == 0 else None

    def _run(self, layout: ResolvedLayout) -> Side | None:
        """One side; None on a rank that has no part in it."""
        num_ranks = count_ranks(layout)
        if num_ranks == 1:
            return self._run_on(layout, None) if self.rank == 0 else None
        self._num_turns += 1
        if self.rank >= num_ranks:
            return None
        assert self._environment is not None
        if self._store is None:
            return self._run_on(layout, self._environment)
        turn = f"turn {self._num_turns}"
        if self.rank == 0:
            self._store.set(turn, "begins")
        self._store.wait([turn], _PATIENCE)
        own = replace(self._environment, world_size=num_ranks, local_world_size=num_ranks)
        return self._run_on(layout, own, PrefixStore(turn, self._store))

    def _run_on(
        self, layout: ResolvedLayout, environment: WorkerEnvironment | None, store: PrefixStore | None = None
    ) -> Side:
        try:
            world = open_world(environment, layout, device=self._device, timeout_seconds=_TIMEOUT_SECONDS, store=store)
            return run_side(self._job, layout, world, steps=self._steps)
        finally:
            close_world()


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
    resolved = resolve(parse_layout(layout), job, num_ranks=environment.world_size if environment else 1)
    reference = choose_reference(against, resolved, job)
    if count_ranks(reference) > 1:
        raise UsageError(
            f"against={str(against)!r} is a layout of several processes.",
            "Here the reference runs on rank 0 alone.",
            "Use trimaran verify, which starts the processes of both sides.",
        )
    ranks = Ranks(job, environment, steps=choose_steps(job, steps), device=device)
    return ranks.verify(resolved, reference, recut=not against)
