import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.batch import RankBatch
from trimaran.data import BatchLoader, Order, build_loader
from trimaran.errors import DataError

NUM_SAMPLES, GLOBAL_BATCH, SEED = 10, 4, 7


class Numbers:
    """Sample i is i, with a draw from each generator."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "draws": torch.tensor([random.random(), np.random.random(), torch.rand(()).item()])}


def loader(source: Any = None, **changes: Any) -> BatchLoader:
    source = Numbers() if source is None else source
    options = {"collate": None, "order": Order(len(source), SEED), "global_batch": GLOBAL_BATCH, "total_samples": 28}
    return build_loader(source, **(options | {"dp": 1, "dp_rank": 0, "micro_batch": GLOBAL_BATCH} | changes))


def samples(batches: list[RankBatch]) -> list[tuple[int, Any]]:
    """(id, all tensors of the sample) of what counts, in order."""
    return [
        (int(sample_id), draws)
        for batch in batches
        for micro_batch in batch.micro_batches
        if not micro_batch.weightless
        for sample_id, draws in zip(micro_batch.tensors["id"], micro_batch.tensors["draws"].tolist(), strict=True)
    ]


def of_all_ranks(dp: int, **changes: Any) -> list[list[tuple[int, Any]]]:
    """For each step, the samples of all ranks one after the other."""
    ranks = [list(loader(dp=dp, dp_rank=rank, **changes)) for rank in range(dp)]
    return [samples(list(step)) for step in zip(*ranks, strict=True)]


ONE_PROCESS = of_all_ranks(1)


def test_one_process_follows_the_order() -> None:
    ids = Order(NUM_SAMPLES, SEED).at(np.arange(28))[1].tolist()
    assert [sample_id for step in ONE_PROCESS for sample_id, _ in step] == ids
    assert sorted(ids[:10]) == sorted(ids[10:20]) == list(range(10))


@settings(max_examples=60, deadline=None)
@given(dp=st.integers(1, 7), micro_batch=st.integers(1, 5), first_step=st.integers(0, 7))
def test_any_cut_and_any_resume_sees_the_samples_of_one_process(dp: int, micro_batch: int, first_step: int) -> None:
    assert of_all_ranks(dp, micro_batch=micro_batch, first_step=first_step) == ONE_PROCESS[first_step:]


@pytest.mark.parametrize("dp", [1, 3])
def test_workers_see_the_samples_of_one_process(dp: int) -> None:
    assert of_all_ranks(dp, micro_batch=1, num_workers=2, first_step=1) == ONE_PROCESS[1:]


def test_a_sample_draws_anew_in_each_epoch() -> None:
    drawn = [(sample_id, tuple(draws)) for step in ONE_PROCESS for sample_id, draws in step]
    assert len({draws for _, draws in drawn}) == 28


def test_batches_say_where_they_are() -> None:
    batches = list(loader(dp=3, dp_rank=2, micro_batch=1, total_samples=6))
    assert [(batch.index, batch.num_samples) for batch in batches] == [(0, 4), (1, 2)]
    whole, partial = batches
    # Four samples over three ranks: 2, 1, 1; all ranks run two micro-batches.
    assert [(m.position, m.num_samples, m.weightless) for m in whole.micro_batches] == [(3, 1, False), (0, 1, True)]
    assert [(m.position, m.num_samples, m.weightless) for m in partial.micro_batches] == [(4, 1, True)]
    assert partial.micro_batches[0].tensors["id"].shape == (1,)


def test_a_loader_knows_its_length_and_can_be_iterated_again() -> None:
    batches = loader(first_step=2)
    assert len(batches) == 5
    assert samples(list(batches)) == samples(list(batches)) == [s for step in ONE_PROCESS[2:] for s in step]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_of_the_process_are_untouched(num_workers: int) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.normal(), torch.rand(3).tolist()

    def seeded() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        draw()

    seeded()
    expected = draw()
    seeded()
    list(loader(num_workers=num_workers))
    assert draw() == expected


def test_a_collate_that_draws_is_repeatable() -> None:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"noise": torch.rand(len(rows))}

    def noise(**changes: Any) -> Iterator[list[float]]:
        return (b.micro_batches[0].tensors["noise"].tolist() for b in loader(collate=collate, **changes))

    once = list(noise())
    assert list(noise(num_workers=2)) == once
    assert list(noise(first_step=3)) == once[3:]
    assert len({tuple(step) for step in once}) == 7


class Faulty(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 6:
            raise KeyError("no such image", 6)
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_named(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        list(loader(Faulty(), num_workers=num_workers))
    assert caught.value.value == "Sample 6 of the data raised KeyError: ('no such image', 6) in epoch 0."
    assert caught.value.rule
    assert "data[6]" in caught.value.remedy
    assert 'raise KeyError("no such image", 6)' in caught.value.__notes__[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_that_fails_is_named(num_workers: int) -> None:
    def collate(rows: list[Any]) -> Any:
        raise ValueError("odd\nrow")

    with pytest.raises(DataError, match=r"collate raised ValueError: odd row on the samples \d, \d, \d, \d of"):
        list(loader(collate=collate, num_workers=num_workers))
    with pytest.raises(DataError, match="'id' of a batch of 4 samples has the shape \\(1, 4\\)") as caught:
        list(loader(collate=lambda rows: {"id": torch.zeros(1, len(rows))}, num_workers=num_workers))
    assert caught.value.remedy == "Let the collate give every tensor one row for each sample."


def test_the_collate_of_the_job_precedes_that_of_the_source() -> None:
    source = Numbers()
    source.collate = lambda rows: {"by": torch.full((len(rows),), 1)}  # type: ignore[attr-defined]
    (micro_batch,) = next(iter(loader(source))).micro_batches
    assert micro_batch.tensors["by"].tolist() == [1] * 4
    own = loader(source, collate=lambda rows: {"by": torch.full((len(rows),), 2)})
    assert next(iter(own)).micro_batches[0].tensors["by"].tolist() == [2] * 4


def test_a_hugging_face_dataset_is_a_source() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": [[i, i + 1] for i in range(6)], "label": list(range(6))})
    batches = list(loader(rows, order=Order(6, shuffle=False), total_samples=6))
    tensors = batches[1].micro_batches[0].tensors
    assert tensors["input_ids"].tolist() == [[4, 5], [5, 6]]
    assert tensors["label"].tolist() == [4, 5]


def test_a_torch_dataset_of_tuples_needs_a_collate() -> None:
    pairs = torch.utils.data.TensorDataset(torch.arange(6), torch.arange(6))
    with pytest.raises(DataError, match="A sample is of type tuple"):
        list(loader(pairs, total_samples=6))
    rows = loader(pairs, total_samples=6, collate=lambda pairs: {"x": torch.stack([x for x, _ in pairs])})
    assert len(list(rows)) == 2
