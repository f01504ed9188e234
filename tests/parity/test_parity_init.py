"""init="by_name": every rank begins with the weights of one process, and trains from them alike."""

from __future__ import annotations

from dataclasses import replace

import parity_jobs
import pytest
import torch
from hf_jobs import HFCase
from hf_jobs import build_job as build_hf_job
from parity_engine import start, whole
from parity_jobs import Case
from torch import Tensor

import trimaran as tm
from pool import Pool


def build_job(name: str) -> tm.Job:
    job = build_hf_job(HFCase(name)) if name in ("llama", "gpt2") else parity_jobs.build_job(Case(name))
    return replace(job, init="by_name")


def first_tensors(name: str, layout: str = "") -> dict[str, Tensor]:
    """The weights and buffers with which this rank would begin, whole."""
    engine, _, _ = start(build_job(name), precision="fp32", layout=layout)
    tensors = (*engine.model.named_parameters(), *engine.model.named_buffers())
    return {key: whole(each).detach().clone() for key, each in tensors}


def losses(name: str, layout: str = "") -> list[float]:
    engine, loader, _ = start(build_job(name), layout=layout)
    return [engine.step(batch).loss for batch in loader]


@pytest.mark.parametrize("layout", ["", "zero=1", "zero=3"])
@pytest.mark.parametrize("name", ["transformer", "convnet", "stack", "llama", "gpt2"])
def test_first_weights_and_buffers_are_those_of_one_process(pool: Pool, name: str, layout: str) -> None:
    (alone,) = pool.run(first_tensors, 1, name)
    for tensors in pool.run(first_tensors, 2, name, layout):
        assert tensors.keys() == alone.keys()
        assert all(torch.equal(tensors[key], alone[key]) for key in alone)


@pytest.mark.parametrize(
    ("name", "layout"), [("transformer", ""), ("gpt2", ""), ("stack", "zero=2"), ("gpt2", "zero=3")]
)
def test_two_ranks_train_from_them_as_one(pool: Pool, name: str, layout: str) -> None:
    (alone,) = pool.run(losses, 1, name)
    for each in pool.run(losses, 2, name, layout):
        assert each == pytest.approx(alone, rel=1e-12, abs=0)


def test_they_are_others_than_those_of_the_whole_constructor() -> None:
    job = build_job("transformer")
    engines = [start(each)[0] for each in (job, replace(job, init="whole"))]
    by_name, at_once = (engine.model.head.weight.detach() for engine in engines)
    assert float(by_name.std()) == pytest.approx(float(at_once.std()), rel=0.3)
    assert not torch.equal(by_name, at_once)
