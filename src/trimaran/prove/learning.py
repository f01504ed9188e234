"""Does it learn: gradients everywhere, one batch overfits, loss falls on a small subset."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch

from trimaran.batch import RankBatch
from trimaran.engine import Engine
from trimaran.prove.bench import Bench
from trimaran.prove.evaluation import some
from trimaran.prove.finding import Finding, failed, passed, skipped
from trimaran.prove.loss import smallest_loss
from trimaran.prove.training import Training, train
from trimaran.units import format_number

NAMES = ("gradients", "one_batch_overfits")
SUBSET = "loss_falls"

_GRADIENTS_RULE = "Every parameter that requires a gradient gets one that is finite and, soon, not zero."
_OVERFIT_RULE = (
    "A model that can learn at all brings the loss of one small batch half of the way down to its smallest value; a "
    "loss of one's own, whose smallest value is not known, a tenth towards 0."
)
_SUBSET_RULE = "On a few samples seen several times the loss falls."
_FALLEN = 0.5
_FALLEN_OF_OWN = 0.1
_SLOWER = 0.1
_SUBSET_FALL = 0.02
_FEWEST_OVERFIT_STEPS = 50
_FEWEST_SUBSET_STEPS = 12


def look_at_overfitting(bench: Bench, engine: Engine) -> Iterator[Finding]:
    """Trains on one micro-batch at the job's peak rate; on its way it looks at the gradients.

    `engine` is a fresh one, built for that rate.
    """
    batch = bench.first_batch()
    smallest = smallest_loss(bench.job, engine, batch.micro_batches[0])
    has_fallen = partial(_has_fallen, smallest=smallest)
    training = _overfit(bench, engine, batch, has_fallen)
    yield _judge_gradients(training)
    if training.not_finite:
        yield skipped(NAMES[1], "its gradient is not finite")
        return
    slower = None
    if not has_fallen(training.losses) and not training.out_of_time:
        slow_job = bench.at_rate(global_batch=bench.job.global_batch, share=_SLOWER)
        slower = _overfit(bench, bench.build_engine(slow_job), batch, has_fallen)
    helps = slower is not None and has_fallen(slower.losses)
    yield _judge_overfitting(bench, training, fallen=has_fallen(training.losses), slower_helps=helps)


def train_on_subset(bench: Bench, engine: Engine) -> tuple[Training, list[RankBatch]]:
    """Trains on the subset, several times over, each sample fetched anew. Also gives the first three batches."""
    first: list[RankBatch] = []

    def noted() -> Iterator[RankBatch]:
        for batch in bench.loader(bench.subset(), batch=bench.subset_batch, steps=bench.limits.subset_steps):
            if len(first) < 3:
                first.append(batch)
            yield batch

    return train(engine, noted(), seconds=bench.limits.training_seconds, least_steps=3), first


def judge_subset(training: Training) -> Finding:
    """Compares the losses of the first and the last quarter of the steps."""
    if training.diverged:
        return failed(
            SUBSET,
            f"The loss is {training.losses[-1]} at step {len(training.losses)}.",
            _SUBSET_RULE,
            "Lower the learning rate, warm it up, or clip: Job(clip=1.0).",
        )
    num_steps = len(training.losses)
    quarter = max(1, num_steps // 4)
    before, after = fmean(training.losses[:quarter]), fmean(training.losses[-quarter:])
    shown = f"{before:.4g} → {after:.4g} in {num_steps} steps"
    if after < before - _SUBSET_FALL * abs(before):
        return passed(SUBSET, shown, _SUBSET_RULE)
    if training.out_of_time and num_steps < _FEWEST_SUBSET_STEPS:
        return skipped(SUBSET, f"too slow to tell: {shown}")
    return failed(
        SUBSET,
        f"The loss goes {shown}.",
        _SUBSET_RULE,
        "Where one batch overfits, look at the data: labels that belong to other inputs or are drawn anew at each "
        "fetch, augmentation that leaves nothing; else a rate too high or too low for batches that differ.",
    )


def free_memory() -> None:
    """Gives back what dropped engines held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _overfit(bench: Bench, engine: Engine, batch: RankBatch, has_fallen: Callable[[Sequence[float]], bool]) -> Training:
    batches = (replace(batch, index=step) for step in range(bench.limits.overfit_steps))
    return train(engine, batches, seconds=bench.limits.training_seconds, least_steps=3, enough=has_fallen)


def _has_fallen(losses: Sequence[float], smallest: float | None) -> bool:
    """Whether the lowest loss is far enough below the first."""
    way = abs(losses[0]) if smallest is None else abs(losses[0] - smallest)
    return min(losses) < losses[0] - way * (_FALLEN if smallest is not None else _FALLEN_OF_OWN)


def _judge_gradients(training: Training) -> Finding:
    if training.not_finite:
        return failed(
            NAMES[0],
            f"The first gradient is not finite in {some(training.not_finite)}.",
            _GRADIENTS_RULE,
            "Look for the square root, the division or the logarithm of zero, and for masks that leave nothing.",
        )
    if training.silent:
        return failed(
            NAMES[0],
            f"No gradient reaches {some(training.silent)} in {min(len(training.losses), 5)} steps.",
            _GRADIENTS_RULE,
            "Use them in forward, take away the detach() or no_grad() before them, or freeze them: "
            "requires_grad_(False).",
        )
    return passed(NAMES[0], "finite and not zero for every trained parameter", _GRADIENTS_RULE)


def _judge_overfitting(bench: Bench, training: Training, *, fallen: bool, slower_helps: bool) -> Finding:
    name, losses = NAMES[1], training.losses
    rate = format_number(bench.job.optimizer.rate(bench.job.global_batch).value)
    # A comparison with not-a-number is false, so the smallest is one only where the first is.
    shown = f"{losses[0]:.4g} → {min(losses):.4g} in {len(losses)} steps on one micro-batch at rate {rate}"
    shown += f", where it is {losses[-1]}" if training.diverged else ""
    if fallen:
        return passed(name, shown, _OVERFIT_RULE)
    if slower_helps:
        return failed(
            name,
            f"The loss goes {shown}, and falls at a tenth of that rate.",
            _OVERFIT_RULE,
            "Lower the optimizer's learning rate, or give the batch it belongs to: at_batch.",
        )
    if training.out_of_time and len(losses) < _FEWEST_OVERFIT_STEPS:
        return skipped(name, f"too slow to tell: {shown}")
    return failed(
        name,
        f"The loss goes {shown}.",
        _OVERFIT_RULE,
        "Raise the learning rate if it falls slowly; else look at the loss (its sign, its labels), at outputs that "
        "are clamped or saturated, and at what is frozen.",
    )
