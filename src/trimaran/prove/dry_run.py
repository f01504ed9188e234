"""The first thing a check does: one micro-batch forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimaran.batch import MicroBatch
from trimaran.engine import Engine, try_micro_batch
from trimaran.engine.buffers import unchanged_buffers
from trimaran.errors import LossError
from trimaran.prove.bench import Bench
from trimaran.prove.finding import Finding, failed_by, passed

NAME = "runs"
_RULE = "One micro-batch goes forward and backward before anything else is asked."


@dataclass(frozen=True)
class DryRun:
    """What came of it. Without an engine and a micro-batch nothing else can be looked at.

    `loss` is the mean loss of the micro-batch at the first weights, in training mode; `loss_error` what the engine
    has against the loss.
    """

    finding: Finding
    engine: Engine | None = None
    micro_batch: MicroBatch | None = None
    loss: float = math.nan
    loss_error: LossError | None = None


def dry_run(bench: Bench) -> DryRun:
    """Builds the job's model and data and runs one micro-batch, which leaves no trace."""
    loss_error = None
    try:
        engine = bench.build_engine(bench.at_rate(global_batch=bench.job.global_batch))
        micro_batch = bench.first_batch().micro_batches[0]
        loss_error = _try(bench, engine, micro_batch)
        loss = _first_loss(engine, micro_batch)
    except Exception as problem:
        return DryRun(failed_by(NAME, loss_error or problem))
    shapes = ", ".join(f"{key} {tuple(micro_batch.tensors[key].shape)}" for key in bench.job.input_keys.values())
    return DryRun(passed(NAME, f"with {shapes}", _RULE), engine, micro_batch, loss, loss_error)


def _try(bench: Bench, engine: Engine, micro_batch: MicroBatch) -> LossError | None:
    try:
        try_micro_batch(engine, micro_batch, bench.job.input_keys)
    except LossError as error:
        return error
    finally:
        engine.drop_gradients()
    return None


def _first_loss(engine: Engine, micro_batch: MicroBatch) -> float:
    """Training mode, so that batch statistics are those of the batch. A loss that cannot be computed raises."""
    with unchanged_buffers(engine.model):
        tensors = engine.to_device(micro_batch)
        engine.seed_micro_batch(0, micro_batch)
        total = engine.loss.total(engine.forward(tensors), tensors)
        weight = float(engine.loss.weight(micro_batch.tensors))
        return float(total.detach()) / weight if weight else math.nan
