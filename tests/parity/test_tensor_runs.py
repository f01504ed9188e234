"""Runs with tensor parallelism: saved and continued in any layout, evaluated, and their weights written whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_engine import assert_close, start, whole_weights
from safetensors.torch import load_file
from tensor_jobs import TensorCase, TinyGPT, build_job

import trimaran as tm
from pool import Pool
from resuming import NEVER, assert_same_run, train
from tiny_job import events_of, losses_of
from trimaran.records import WEIGHTS_FILE

FP64 = 1e-12
CASE = TensorCase(attend="chunk", optimizer="adamw", tied=True)


def logits_as_text(model: torch.nn.Module) -> str:
    return " ".join(f"{each:.6f}" for each in model(torch.tensor([[1, 2, 3]]))[0, -1].tolist())


def run_part(run: Path, layout: str, until: int | None, save_every: str = "2steps", case: TensorCase = CASE) -> None:
    job = replace(build_job(case), steps=8, epochs=None, sample=logits_as_text)
    options = tm.RunOptions(save_every=save_every, evaluate_every="3steps", audit_every=4)
    train(job, f"precision=fp64 {layout}", run=run, options=options, until=until)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole run on one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    run_part(run, "", None, NEVER)
    return run


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "tp=2"), (1, ""), (4, "dp=2 tp=2 sp=true")],
        [(1, ""), (4, "dp=2 tp=2 zero=3"), (2, "tp=2 sp=true micro_batch=2")],
    ],
    ids=str,
)
def test_continued_in_other_layouts(pool: Pool, tmp_path: Path, alone: Path, parts: list[tuple[int, str]]) -> None:
    for (num_ranks, layout), until in zip(parts, (3, 5, None), strict=True):
        pool.run(run_part, num_ranks, tmp_path / "a", layout, until)
    assert [each for each in events_of(tmp_path / "a") if each[0] == "resumed"] == [("resumed", 2), ("resumed", 4)]
    assert losses_of(tmp_path / "a") == pytest.approx(losses_of(alone), rel=FP64, abs=0)
    mine, theirs = (
        {name: each.double() for name, each in load_file(run / WEIGHTS_FILE).items()} for run in (tmp_path / "a", alone)
    )
    assert_close(mine, theirs, FP64, "weight")


def test_a_killed_run_goes_on_byte_for_byte(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_part, 2, tmp_path / "whole", "tp=2 sp=true", None, NEVER)
    pool.run(run_part, 2, tmp_path / "parts", "tp=2 sp=true", 5)
    pool.run(run_part, 2, tmp_path / "parts", "tp=2 sp=true", None)
    assert ("resumed", 4) in events_of(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def figures(layout: str) -> tuple[dict[str, float], bool]:
    """An evaluation's, and whether what the model gives under no_grad is plain."""
    engine, loader, _ = start(build_job(CASE), layout=layout, micro_batch=2)
    batch = next(iter(loader))
    engine.step(batch)
    with torch.no_grad():
        output = engine.model(torch.tensor([[1, 2, 3]]))
    return engine.evaluate([batch]), type(output) is torch.Tensor


@pytest.mark.parametrize("layout", ["tp=2", "tp=2 sp=true"])
def test_an_evaluation_is_that_of_one_process(pool: Pool, layout: str) -> None:
    expected, _ = figures("")
    assert expected["accuracy"] > 0
    for found, is_plain in pool.run(figures, 2, layout):
        assert found == pytest.approx(expected, rel=FP64)
        assert is_plain


def test_first_weights_are_those_of_one_process(pool: Pool) -> None:
    for weights in pool.run(first_weights, 2):
        torch.manual_seed(5)
        assert all(torch.equal(weights[name], each.double()) for name, each in TinyGPT(CASE).named_parameters())


def first_weights() -> dict[str, torch.Tensor]:
    return whole_weights(start(build_job(CASE), layout="tp=2")[0])
