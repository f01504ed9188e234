"""All checks of a job, in order: begin here. Start small, on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from trimaran.job import Job
from trimaran.options import Device
from trimaran.prove import dry_run, evaluation, learning, loading, loss, repeat, samples
from trimaran.prove.bench import Bench, Limits, open_bench
from trimaran.prove.evaluation import digest_state
from trimaran.prove.finding import Finding, guarded, skip, skipped

CHECKS: Mapping[str, str] = {
    "runs": "forward and backward",
    "evaluation_keeps_state": "evaluation and weights",
    "evaluation_keeps_randomness": "evaluation and chance",
    "independent_samples": "samples independent",
    "batch_statistics": "batch statistics",
    "loss_sum": "loss is a sum",
    "first_loss": "first loss",
    "gradients": "gradients",
    "one_batch_overfits": "one batch overfits",
    "loss_falls": "loss falls",
    "data_loading": "data loading",
    "save_and_load": "save and load",
    "same_seed": "same seed, same run",
}
"""Name -> title, in the order in which findings come."""

_NO_BATCH = "not even one batch is known to be learnt"
_REPEATING = (learning.SUBSET, loading.NAME, repeat.SAVE, repeat.SAME)


def check_job(
    job: Job, *, device: Device = "auto", num_workers: int = 0, limits: Limits | None = None
) -> Iterator[Finding]:
    """One finding for each of `CHECKS`, in their order, each as soon as it is known; minutes at most, in this process.

    Precision is fp32. Raises ClusterError for a device that is not here; whatever the job's own code does is a
    finding.
    """
    bench = open_bench(job, device=device, num_workers=num_workers, limits=limits or Limits())
    found: dict[str, Finding] = {}
    for finding in _check(bench, found):
        found[finding.name] = finding
        yield finding


def _check(bench: Bench, found: Mapping[str, Finding]) -> Iterator[Finding]:
    """`found` holds what has been yielded so far: later checks ask it."""
    dry = dry_run.dry_run(bench)
    yield dry.finding
    if dry.engine is None or dry.micro_batch is None:
        yield from skip(list(CHECKS)[1:], "forward and backward do not run")
        return
    engine, micro_batch = dry.engine, dry.micro_batch
    yield from guarded(evaluation.NAMES, evaluation.look_at_evaluation(bench, engine))
    yield from guarded([samples.INDEPENDENT], samples.look_at_independence(bench, engine, micro_batch))
    leaks = found[samples.INDEPENDENT].status == "failed"
    yield from guarded([samples.STATISTICS], samples.look_at_statistics(bench, engine, micro_batch, leaks=leaks))
    yield from guarded(loss.NAMES, loss.look_at_loss(bench.job, dry, found))
    if found["loss_sum"].status == "failed" or not math.isfinite(dry.loss):
        yield from skip([*learning.NAMES, *_REPEATING], "the loss is not yet one to train on")
        return
    yield from _in_time(bench, learning.NAMES, partial(learning.look_at_overfitting, bench, engine))
    del dry, engine  # its memory is needed
    learning.free_memory()
    yield from _in_time(bench, _REPEATING, partial(_learn_and_repeat, bench, found))


def _learn_and_repeat(bench: Bench, found: Mapping[str, Finding]) -> Iterator[Finding]:
    """Trains on a small subset; looks at what that costs, whether its result can be kept, and whether it repeats."""
    job = bench.at_rate(global_batch=bench.subset_batch)
    engine = bench.build_engine(job)
    weights = digest_state(engine.model)
    training, batches = learning.train_on_subset(bench, engine)
    told = found["one_batch_overfits"]
    yield learning.judge_subset(training) if told.status == "passed" else skipped(learning.SUBSET, _NO_BATCH)
    yield loading.judge_loading(bench, training)
    yield repeat.look_at_saving(bench, engine)
    del engine
    learning.free_memory()
    first = repeat.FirstSteps(weights, batches, training.losses[: len(batches)])
    yield repeat.look_at_same_seed(bench, job, first)


def _in_time(bench: Bench, names: Sequence[str], check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    if bench.time_is_up:
        return skip(names, f"{bench.limits.total_seconds:g} seconds are over")
    return guarded(names, check())
