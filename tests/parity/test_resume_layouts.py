"""A run that is continued on other numbers of ranks, or in another precision, goes on equal to rounding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import parity_jobs
import pytest
import torch
from parity_engine import assert_close
from torch import Tensor

import trimaran as tm
from pool import Pool
from resuming import NEVER, Case, Contents, Ids, build_job, read_newest, train
from tiny_job import events_of, lines_of, losses_of

FP64 = 1e-12
BATCH, STEPS, SAMPLES = 7, 10, 16
Kind = Literal["adamw", "sgd"]


def token_job(optimizer: Kind) -> tm.Job:
    """Ragged sequences in batches that no number of ranks divides; ten steps of four epochs, the last of one sample."""
    case = parity_jobs.Case(optimizer=optimizer, global_batch=BATCH, num_samples=SAMPLES, epochs=4)
    job = parity_jobs.build_job(case)
    data = [each | {"id": torch.tensor(index)} for index, each in enumerate(job.data)]
    return replace(job, data=data, schedule=tm.optim.linear(warmup="3steps"))


def part_of_run(run: Path, optimizer: Kind, until: int | None, save_every: str = "2steps", layout: str = "") -> Ids:
    """One start of the run on this rank; the samples it saw."""
    return train(
        token_job(optimizer),
        f"precision=fp64 micro_batch=2 {layout}",
        run=run,
        options=tm.RunOptions(save_every=save_every),
        until=until,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, tuple[Path, Ids]]:
    """By optimizer: a run on one process without a stop, and the samples it saw."""
    runs: dict[Kind, tuple[Path, Ids]] = {}
    for kind in ("adamw", "sgd"):
        run = tmp_path_factory.mktemp(kind) / "run"
        runs[kind] = run, part_of_run(run, kind, None, NEVER)
    return runs


@pytest.mark.parametrize(
    ("optimizer", "ranks", "layouts"),
    [
        ("adamw", (1, 2, 4, 2, 1), [""] * 5),
        ("adamw", (4, 3), ["", ""]),
        ("sgd", (3, 2), ["", ""]),
        ("adamw", (2, 4, 1, 3, 2), ["zero=3", "zero=1 shard=2", "", "zero=2", "zero=3"]),
        ("sgd", (1, 4), ["", "zero=3 shard=2"]),
    ],
    ids=str,
)
def test_other_numbers_of_ranks(
    pool: Pool,
    tmp_path: Path,
    undisturbed: dict[Kind, tuple[Path, Ids]],
    optimizer: Kind,
    ranks: tuple[int, ...],
    layouts: list[str],
) -> None:
    reference, samples = undisturbed[optimizer]
    # Left in the middle of steps 4, 6, 8 …: two steps after the last save.
    leave_after = [3 + 2 * index for index in range(len(ranks) - 1)]
    seen = []
    for world, layout, until in zip(ranks, layouts, [*leave_after, None], strict=True):
        of_ranks = pool.run(part_of_run, world, tmp_path / "a", optimizer, until, "2steps", layout)
        seen.append([each for ids in of_ranks for each in ids])
    begins = [0, *(each - 1 for each in leave_after)]
    assert [each for each in events_of(tmp_path / "a") if each[0] == "resumed"] == [
        ("resumed", step) for step in begins[1:]
    ]
    # Each start sees the positions from its checkpoint on, each once; every position has its sample.
    for ids, first, until in zip(seen, begins, [*leave_after, None], strict=True):
        stop = len(samples) if until is None else until * BATCH
        assert Counter(ids) == Counter(samples[first * BATCH : stop])
    assert [each["step"] for each in lines_of(tmp_path / "a/metrics.jsonl")] == list(range(1, STEPS + 1))
    assert losses_of(tmp_path / "a") == pytest.approx(losses_of(reference), rel=FP64, abs=0)
    ours, theirs = read_newest(tmp_path / "a"), read_newest(reference)
    assert ours.state.num_updates == theirs.state.num_updates == STEPS
    assert ours.state.position == theirs.state.position == 4 * SAMPLES
    for kind, expected in by_kind(theirs).items():
        assert_close(by_kind(ours)[kind], expected, FP64, kind)


def by_kind(contents: Contents) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint in sets of like ones: weights, and each kind of state by parameter name."""
    sets: dict[str, dict[str, Tensor]] = {}
    for name, tensor in contents.tensors.items():
        room, _, rest = name.partition(".")
        parameter, _, kind = rest.rpartition(".")
        if room == "model":
            sets.setdefault("weights", {})[rest] = tensor
        else:
            sets.setdefault(kind, {})[parameter] = tensor
    return sets


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-4), ("bf16", 0.02)])
@pytest.mark.parametrize("optimizer", ["adamw", "nested"])
def test_another_precision(tmp_path: Path, optimizer: str, precision: str, tolerance: float) -> None:
    case = Case(optimizer, is_complex=False)
    train(build_job(case), run=tmp_path / "a", options=case.options(NEVER))
    train(build_job(case), run=tmp_path / "b", options=case.options("4steps"), until=5)
    train(build_job(case), f"precision={precision}", run=tmp_path / "b", options=case.options(NEVER))
    assert ("resumed", 4) in events_of(tmp_path / "b")
    ours, theirs = losses_of(tmp_path / "b"), losses_of(tmp_path / "a")
    assert ours[:4] == theirs[:4]
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=tolerance)
    # What had the parameters' type has it still; counts and what was held in half precision keep theirs.
    before, after = (read_newest(tmp_path / name).tensors for name in "ab")
    widened = {torch.float32: torch.float64} if precision == "fp64" else {}
    for name, each in before.items():
        is_own = name.endswith(".step") or "*" in name  # of the optimizer itself, and not of a parameter's kind
        assert after[name].dtype == (each.dtype if is_own else widened.get(each.dtype, each.dtype)), name
