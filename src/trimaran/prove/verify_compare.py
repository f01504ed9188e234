"""Two sides compared: one row for each thing that is compared, and the first tensor that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from trimaran.errors import LayoutError
from trimaran.layout import ResolvedLayout, deal
from trimaran.prove.tolerances import TOLERANCES, excess, excesses, state_excesses
from trimaran.prove.verify_cause import (
    explain_figure,
    explain_gradient,
    explain_norm,
    explain_options,
    explain_update,
)
from trimaran.prove.verify_outputs import find_output
from trimaran.prove.verify_side import (
    EARLY_STATE,
    EARLY_WEIGHTS,
    FIRST_GRADIENTS,
    FIRST_WEIGHTS,
    SECOND_GRADIENTS,
    STATE,
    WEIGHTS,
    Side,
    Unlike,
)
from trimaran.prove.verify_traffic import Collectives


@dataclass(frozen=True)
class Row:
    """One thing compared. `worst` is the tensor or step that is off by most, `excess` by how much, as a share of its
    size (docs/numerics.md). What is "reported" has no promise at this precision."""

    name: str
    worst: str
    excess: float
    allowed: float
    status: Literal["passed", "failed", "reported"]


@dataclass(frozen=True)
class Difference:
    """The first thing that differs, in the order in which a step computes: `tensor` is its name, `what` says of what
    kind it is and when, `excess` by how much, `cause` what the numbers show; the last may be empty."""

    tensor: str
    what: str
    excess: float
    cause: str


@dataclass(frozen=True)
class Verification:
    """Whether a layout equals its reference. `difference` is None where it does."""

    layout: str
    against: str
    num_ranks: int
    num_reference_ranks: int
    job: str
    num_parameters: int
    global_batch: int
    steps: int
    rows: tuple[Row, ...]
    difference: Difference | None
    collectives: Mapping[str, Collectives] | None
    """Of one rank in the second step, by kind; None where there was no second step."""
    not_compared: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.difference is None


def compare(side: Side, reference: Side) -> Verification:
    """The second side is the one that is right."""
    rows = tuple(_rows(side, reference))
    failed = [row for row in rows if row.status == "failed"]
    difference = None
    if failed:
        difference = next(_differences(side, reference), None)
        if difference is None:
            difference = Difference(failed[0].worst, failed[0].name, failed[0].excess, "")
    return Verification(
        layout=side.layout,
        against=reference.layout,
        num_ranks=side.num_ranks,
        num_reference_ranks=reference.num_ranks,
        job=side.job,
        num_parameters=side.num_parameters,
        global_batch=side.global_batch,
        steps=side.steps,
        rows=rows,
        difference=difference,
        collectives=side.collectives,
        not_compared=tuple(_not_compared(side, reference, equal=difference is None)),
    )


def refuse_other_cut(side: Side, reference: ResolvedLayout) -> None:
    """Raises LayoutError where the model has batch statistics, and the reference cuts the batch in another way."""
    cuts = [
        (each.start, each.stop - each.start)
        for rank in range(reference.dp)
        for each in deal(
            start=0, stop=side.num_samples, dp=reference.dp, dp_rank=rank, micro_batch=reference.micro_batch
        )
        if not each.weightless
    ]
    if side.batch_norms and side.cuts != sorted(cuts):
        sizes = [", ".join(map(str, sorted({count for _, count in each}))) for each in (side.cuts, cuts)]
        raise LayoutError(
            f"{side.batch_norms[0]} normalises by batch statistics, over forwards of {sizes[0]} samples in "
            f"{side.layout} and of {sizes[1]} in {reference}.",
            "Statistics of a batch depend on how it is cut: such layouts are not equal, and need not be.",
            "Compare with the same cut (a micro_batch that divides the share of a rank), or use GroupNorm.",
        )


def _rows(side: Side, reference: Side) -> Iterator[Row]:
    tolerance = TOLERANCES[side.precision]
    late = _judges_late(side)
    yield _row("first weights", excesses(side.at(FIRST_WEIGHTS), reference.at(FIRST_WEIGHTS)), 0.0)
    for name, mine, theirs in (
        ("loss", side.losses, reference.losses),
        ("gradient norm", side.norms, reference.norms),
    ):
        judged = len(theirs) if late else 1
        found = {f"step {step}": _figure_excess(mine, theirs, step) for step in range(1, len(theirs) + 1)}
        yield _row(name, dict(list(found.items())[:judged]), tolerance)
        if judged < len(found):
            yield _row(f"{name}, later steps", dict(list(found.items())[judged:]), tolerance, judged=False)
    yield _row("first gradients", excesses(side.at(FIRST_GRADIENTS), reference.at(FIRST_GRADIENTS)), tolerance)
    steps = f"{side.steps} steps" if side.steps > 1 else "1 step"
    yield _row(f"weights after {steps}", excesses(side.at(WEIGHTS), reference.at(WEIGHTS)), tolerance, judged=late)
    found = state_excesses(side.at(STATE), reference.at(STATE))
    yield _row(f"optimizer state after {steps}", found, tolerance, judged=late)
    names = dict.fromkeys((*reference.options, *side.options))
    yield _row("optimizer groups", {name: _inf(explain_options(side, reference, name)) for name in names}, 0.0)
    if side.num_ranks > 1:
        unlike = {f"{each.name} on rank {each.rank}, {each.moment}": math.inf for each in side.unlike}
        yield _row("ranks hold the same", unlike, 0.0)


def _row(name: str, found: Mapping[str, float], allowed: float, *, judged: bool = True) -> Row:
    worst = max(found, key=lambda each: found[each], default="")
    largest = found[worst] if worst else 0.0
    status: Literal["passed", "failed", "reported"] = "passed" if largest <= allowed else "failed"
    return Row(name, worst if largest else "", largest, allowed, status if judged else "reported")


def _judges_late(side: Side) -> bool:
    """Whether what follows the first update is promised: in float32 AdamW makes updates of noise (docs/numerics.md)."""
    return side.precision == "fp64" or (side.precision == "fp32" and side.optimizer == "SGD")


def _differences(side: Side, reference: Side) -> Iterator[Difference]:
    """All of them, in the order in which they arise."""
    tolerance = TOLERANCES[side.precision]
    for name, off in excesses(side.at(FIRST_WEIGHTS), reference.at(FIRST_WEIGHTS)).items():
        if off:
            yield Difference(name, "first value", off, "it is another one before the first step")
    yield from _unlike(side, FIRST_WEIGHTS, "first value")
    output = find_output(side, reference)
    if output is not None:
        yield Difference(output.name, "output in step 1", output.excess, output.cause)
    yield from _figures(side, reference, 1, "loss")
    yield from _gradients(side, reference, FIRST_GRADIENTS)
    yield from _figures(side, reference, 1, "gradient norm")
    for name in reference.order:
        if told := explain_options(side, reference, name):
            yield Difference(name, "optimizer group", math.inf, told)
    if not _judges_late(side):
        yield from _unlike(side, EARLY_WEIGHTS, "weight after step 1")
        return
    yield from _tensors(side, reference, EARLY_WEIGHTS, "weight after step 1")
    for name, off in state_excesses(side.at(EARLY_STATE), reference.at(EARLY_STATE)).items():
        if off > tolerance:
            yield Difference(name, "optimizer state after step 1", off, "")
    for step in range(2, side.steps + 1):
        yield from _figures(side, reference, step, "loss")
        if step == 2:
            yield from _gradients(side, reference, SECOND_GRADIENTS)
        yield from _figures(side, reference, step, "gradient norm")
    yield from _tensors(side, reference, WEIGHTS, f"weight after step {side.steps}")


def _tensors(side: Side, reference: Side, moment: str, what: str) -> Iterator[Difference]:
    found = excesses(side.at(moment), reference.at(moment))
    unlike = _first_unlike(side, moment)
    for name in _ordered(found, reference):
        if found[name] > TOLERANCES[side.precision]:
            told = explain_update(side, reference, name) if moment == EARLY_WEIGHTS else ""
            yield Difference(name, what, found[name], told)
        elif name in unlike:
            yield _of_rank(unlike[name], what)


def _gradients(side: Side, reference: Side, moment: str) -> Iterator[Difference]:
    """In the order of a backward, in which a fault spreads."""
    found = excesses(side.at(moment), reference.at(moment))
    unlike = _first_unlike(side, moment)
    what = f"gradient in step {1 if moment == FIRST_GRADIENTS else 2}"
    for name in reversed(_ordered(found, reference)):
        if found[name] > TOLERANCES[side.precision]:
            yield Difference(name, what, found[name], explain_gradient(side, reference, name, moment))
        elif name in unlike:
            told = explain_gradient(side, reference, name, moment) if moment == FIRST_GRADIENTS else ""
            yield _of_rank(unlike[name], what, told)


def _ordered(found: Mapping[str, float], reference: Side) -> list[str]:
    """The names in the order of their first use in a forward."""
    at = {name: index for index, name in enumerate(reference.order)}
    return sorted(found, key=lambda name: at.get(name, len(at)))


def _figures(side: Side, reference: Side, step: int, name: str) -> Iterator[Difference]:
    mine, theirs = (side.losses, reference.losses) if name == "loss" else (side.norms, reference.norms)
    off = _figure_excess(mine, theirs, step)
    if off > TOLERANCES[side.precision]:
        is_first_norm = name == "gradient norm" and step == 1
        told = (
            explain_norm(side, reference)
            if is_first_norm
            else explain_figure(side, reference, mine[step - 1], theirs[step - 1])
        )
        yield Difference(name, f"figure of step {step}", off, told)


def _figure_excess(mine: list[float], theirs: list[float], step: int) -> float:
    return excess(mine[step - 1], theirs[step - 1]) if step <= len(mine) else math.inf


def _unlike(side: Side, moment: str, what: str) -> Iterator[Difference]:
    return (_of_rank(each, what) for each in _first_unlike(side, moment).values())


def _first_unlike(side: Side, moment: str) -> dict[str, Unlike]:
    return {each.name: each for each in side.unlike if each.moment == moment}


def _of_rank(unlike: Unlike, what: str, told: str = "") -> Difference:
    return Difference(unlike.name, f"{what} on rank {unlike.rank}", math.inf, told or "rank 0 holds another one")


def _inf(told: str) -> float:
    return math.inf if told else 0.0


def _not_compared(side: Side, reference: Side, *, equal: bool) -> Iterator[str]:
    if side.dropout:
        yield f"dropout is off on both sides: its masks depend on the cut ({_some(side.dropout)})"
    if side.batch_norms:
        yield (
            f"batch statistics ({_some(side.batch_norms)}) depend on the cut: both sides were cut alike, into "
            f"micro-batches of {side.micro_batch}, and the running ones are left out; with GroupNorm no cut matters"
        )
    if side.draws_numbers or reference.draws_numbers:
        yield "the forward draws random numbers that could not be turned off; what follows from them depends on the cut"
    if not side.activations or not reference.activations:
        yield "the outputs of modules, of which a compiled block shows none"
    elif side.rowless or reference.rowless:
        yield f"outputs without a row for each sample ({_some(side.rowless or reference.rowless)})"
    if equal and (output := find_output(side, reference)) is not None:
        yield f"the output of {output.name}, which differs, while all that follows from it is equal"
    if not _judges_late(side):
        yield "what follows the first update, where this precision makes updates of rounding noise: use precision=fp64"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
