"""A `datasets.Dataset` is a source as it is: its columns are a sample's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from hf_jobs import NUM_SAMPLES, HFCase, build_job, token_samples
from parity_engine import start
from torch import Tensor

import trimaran as tm
from pool import Pool
from trimaran.data import fingerprint
from trimaran.errors import DataError


def as_dataset(**more: list[Any]) -> Dataset:
    samples = token_samples()
    columns = {key: [sample[key].tolist() for sample in samples] for key in samples[0]}
    return Dataset.from_dict(columns | more)


def batches(data: Any) -> list[dict[str, Tensor]]:
    """Every micro-batch this rank gets."""
    job = build_job(HFCase("llama"))
    loader = start(tm.Job(**{**vars(job), "data": data}), precision="fp32", micro_batch=2)[1]
    return [micro_batch.tensors for batch in loader for micro_batch in batch.micro_batches]


@pytest.mark.parametrize("form", ["lists", "torch", "numpy", "memory-mapped"])
def test_its_columns_are_the_tensors_of_a_sample(form: str, tmp_path: Any) -> None:
    data = as_dataset()
    if form == "memory-mapped":
        data.save_to_disk(tmp_path)
        data = Dataset.load_from_disk(tmp_path)
    elif form != "lists":
        data = data.with_format(form)
    expected, found = batches(token_samples()), batches(data)
    assert len(found) == len(expected) > NUM_SAMPLES
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key])
            assert one[key].dtype == other[key].dtype


def step_on_a_dataset() -> tuple[str, float, float]:
    data = as_dataset()
    engine, loader, _ = start(tm.Job(**{**vars(build_job(HFCase("llama"))), "data": data}))
    result = engine.step(next(iter(loader)))
    return fingerprint(data), result.loss, result.grad_norm


def test_every_rank_knows_it_by_the_same_fingerprint_and_trains_as_on_a_list(pool: Pool) -> None:
    first, second = pool.run(step_on_a_dataset, 2)
    assert first == second
    engine, loader, _ = start(build_job(HFCase("llama")))
    alone = engine.step(next(iter(loader)))
    assert first[1:] == pytest.approx((alone.loss, alone.grad_norm), rel=1e-12, abs=0)
    assert first[0] != fingerprint(as_dataset(more=list(range(NUM_SAMPLES))))


def test_a_column_of_text_is_named() -> None:
    with pytest.raises(DataError, match="'text' of a sample is of type str") as caught:
        batches(as_dataset(text=["a"] * NUM_SAMPLES))
    assert "'text'" in caught.value.remedy
