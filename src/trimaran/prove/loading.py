"""Does loading keep up with training, and how many workers would?"""

from __future__ import annotations

import math
import os
import time
from statistics import median

from trimaran.prove.bench import SUBSET_BATCHES, Bench
from trimaran.prove.finding import Finding, failed, passed, skipped
from trimaran.prove.training import Training
from trimaran.units import format_seconds

NAME = "data_loading"
_RULE = (
    "Loading in the training process may take at most half of a step's time, loading by workers, which is at the same "
    "time, at most the whole; a run that waits less than a minute in all is left alone."
)
_LARGEST_SHARE = 0.5
_MOST_BATCHES = 12
_NEGLIGIBLE_SECONDS = 60.0


def judge_loading(bench: Bench, training: Training) -> Finding:
    """Times loading by this process and compares it with the steps that were trained."""
    if len(training.seconds) < 2:
        return skipped(NAME, "no step's time is known")
    per_batch = bench.job.global_batch / bench.subset_batch
    step_seconds = per_batch * median(training.seconds[1:])
    load_seconds = per_batch * median(_time_loading(bench))
    workers = bench.num_workers
    waits = max(0.0, load_seconds / workers - step_seconds) if workers else load_seconds
    shown = f"{format_seconds(load_seconds)} to load a global batch, {format_seconds(step_seconds)} to train on it"
    shown += f", {workers} workers" if workers else ""
    keeps_up = waits == 0 if workers else waits <= _LARGEST_SHARE * step_seconds
    if keeps_up or waits * bench.job.total_steps < _NEGLIGIBLE_SECONDS:
        return passed(NAME, shown, _RULE)
    needed = math.ceil(1.2 * load_seconds / step_seconds)  # a fifth more: workers are never quite even
    cores = os.cpu_count() or 1
    more = f"; this machine has {cores} cores: store samples decoded, or cheaper to decode" if needed > cores else ""
    return failed(
        NAME,
        f"{shown}: the run would wait {format_seconds(waits * bench.job.total_steps)} for data.",
        _RULE,
        f"Load with --num-workers {max(needed, workers + 1)}{more}.",
    )


def _time_loading(bench: Bench) -> list[float]:
    """Seconds of each batch of the size trained on, in the run's order, behind the samples already fetched."""
    seconds = []
    began = time.monotonic()
    loader = bench.loader(bench.job.data, batch=bench.subset_batch, steps=_MOST_BATCHES, first_step=SUBSET_BATCHES)
    batch_began = began
    for _ in loader:
        now = time.monotonic()
        seconds.append(now - batch_began)
        batch_began = now
        if len(seconds) > 1 and now - began > bench.limits.loading_seconds:
            break
    loader.close()
    return seconds[1:]
