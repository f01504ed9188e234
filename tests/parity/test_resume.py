"""A run that is left in the middle and begun again goes on to the bit as if it had not been (invariant 9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool import Pool
from resuming import NEVER, OPTIMIZERS, Case, assert_same_run, build_job, read_newest, train
from tiny_job import events_of, lines_of
from trimaran.run import Run

# Three steps an epoch: a save after each third step falls on an epoch's last batch.
AT_EPOCHS = ("3steps", 4, 8)
BETWEEN = ("2steps", 3, 7)


def both_runs(
    folder: Path, case: Case, save_every: str, *leave_after: int, prepare: str = "", in_both: bool = False
) -> None:
    """Run "a", undisturbed, and run "b", left after each of these steps and begun again; on this rank."""
    hook = PREPARATIONS.get(prepare, lambda running: None)
    train(build_job(case), case.layout, run=folder / "a", options=case.options(NEVER), prepare=hook)
    for until in (*leave_after, None):
        options = case.options(save_every)
        train(build_job(case), case.layout, run=folder / "b", options=options, until=until, prepare=hook)


def grow_fast(running: Run) -> None:
    assert running.engine.loss_scale is not None
    running.engine.loss_scale.growth_interval = 3


PREPARATIONS = {"grow fast": grow_fast}


def check(folder: Path, *resumed: int) -> None:
    assert_same_run(folder / "b", folder / "a")
    assert [step for event, step in events_of(folder / "b") if event == "resumed"] == list(resumed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_twice_on_the_last_batches_of_epochs(tmp_path: Path, optimizer: str) -> None:
    both_runs(tmp_path, Case(optimizer, clip=0.5, warmup=4), *AT_EPOCHS)
    check(tmp_path, 3, 6)


@pytest.mark.parametrize(
    "case",
    [
        Case("adamw", micro_batch=3, evaluate_every="2steps"),
        Case("adamw", num_workers=2),
        Case("adamw", samples=23, epochs=3, steps=None),  # nine steps, the last of five samples
        Case("adamw", precision="bf16"),
        Case("nested", precision="fp64", is_complex=False),  # safetensors knows no complex128
    ],
    ids=str,
)
def test_resumed_twice_in_the_middle_of_epochs(tmp_path: Path, case: Case) -> None:
    both_runs(tmp_path, case, *BETWEEN)
    check(tmp_path, 2, 6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "rmsprop"])
def test_a_loss_scale_that_moves_and_skipped_steps(tmp_path: Path, optimizer: str) -> None:
    case = Case(optimizer, precision="fp16", outlier=3e3, warmup=5, steps=14)
    both_runs(tmp_path, case, "3steps", 4, 8, prepare="grow fast")
    check(tmp_path, 3, 6)
    skipped = [each["step"] for each in lines_of(tmp_path / "a/metrics.jsonl") if each["skipped"]]
    state = read_newest(tmp_path / "b", 6).state
    assert any(step <= 3 for step in skipped)
    assert any(step > 6 for step in skipped)
    assert state.loss_scale is not None
    assert state.loss_scale["value"] != 2.0**16
    assert state.loss_scale["good_steps"] > 0
    assert state.num_updates == 6 - sum(step <= 6 for step in skipped)


@pytest.mark.parametrize(
    ("case", "prepare"),
    [
        (Case("adamw", evaluate_every="3steps", micro_batch=2, clip=0.5), ""),
        (Case("sgd", precision="fp16", outlier=3e3), "grow fast"),
        (Case("nested", warmup=4), ""),
        (Case("adafactor", samples=23, epochs=3, steps=None), ""),
    ],
    ids=str,
)
def test_resumed_twice_on_two_ranks(pool: Pool, tmp_path: Path, case: Case, prepare: str) -> None:
    pool.run(both_runs, 2, tmp_path, case, *BETWEEN, prepare=prepare)
    check(tmp_path, 2, 6)
