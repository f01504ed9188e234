"""The tests' own pool of workers: values, failures, hangs and replacement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import Pool, RankDied, RankHung
from trimaran.errors import LayoutError


@dataclass
class Point:
    """Travels in both directions, though this module is not on the workers' path."""

    x: float


class Picky(Exception):
    """Cannot be pickled, as its constructor asks for two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def rank_and_sum(value: float, *, scale: float = 1.0) -> tuple[int, int, float]:
    total = torch.tensor([value * (dist.get_rank() + 1) * scale])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def alone() -> tuple[bool, int, int]:
    return dist.is_initialized(), torch.get_num_threads(), os.getpid()


def shift(point: Point) -> Point:
    return Point(point.x + 1)


def fail_on_rank(rank: int, kind: str) -> str:
    if dist.get_rank() == rank:
        if kind == "layout":
            raise LayoutError("tp=3.", "It divides.", "Use 2.")
        if kind == "picky":
            raise Picky("a", "b")
        if kind == "die":
            os._exit(7)
        if kind == "hang":
            time.sleep(60)
        assert kind == "early", "told to fail"
        return "early"
    dist.barrier()
    return "fine"


def test_runs_exactly_the_asked_world(pool: Pool) -> None:
    for world_size in (2, 4, 3):
        expected = 2.0 * sum(range(1, world_size + 1)) * 0.5
        results = pool.run(rank_and_sum, world_size, 2.0, scale=0.5)
        assert results == [(rank, world_size, expected) for rank in range(world_size)]


def test_workers_stay(pool: Pool) -> None:
    [(initialized, threads, pid)] = pool.run(alone, 1)
    assert (initialized, threads) == (False, 1)
    assert pool.run(alone, 1) == [(False, 1, pid)]
    assert pid != os.getpid()
    pool.run(rank_and_sum, 2, 1.0)
    assert pool.pids[0] == pid


def test_arguments_and_results_of_this_module(pool: Pool) -> None:
    assert pool.run(shift, 1, Point(1.5)) == [Point(2.5)]


def test_an_exception_is_raised_again(pool: Pool) -> None:
    with pytest.raises(LayoutError, match="tp=3") as caught:
        pool.run(fail_on_rank, 2, 1, "layout")
    assert caught.value.remedy == "Use 2."
    assert "On rank 1" in caught.value.__notes__[0]
    assert "fail_on_rank" in caught.value.__notes__[0]


def test_an_assertion_and_what_cannot_be_pickled(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="told to fail"):
        pool.run(fail_on_rank, 2, 0, "assert")
    with pytest.raises(RuntimeError, match="Picky: a: b"):
        pool.run(fail_on_rank, 2, 0, "picky")


def test_outcomes_tell_each_rank(pool: Pool) -> None:
    first, second = pool.outcomes(fail_on_rank, 2, 0, "layout")
    assert isinstance(first.error, LayoutError)
    assert isinstance(second.error, RuntimeError)
    assert first.time_seconds < second.time_seconds


def test_a_dead_worker_is_named_and_replaced(pool: Pool) -> None:
    with pytest.raises(RankDied, match=r"rank 1 .* exit code 7"):
        pool.run(fail_on_rank, 2, 1, "die")
    assert len(pool.run(rank_and_sum, 2, 1.0)) == 2


def test_a_hanging_worker_is_killed_and_replaced(pool: Pool) -> None:
    pool.run(alone, 1)
    victim = pool.pids[0]
    first, second = pool.outcomes(fail_on_rank, 2, 0, "hang", timeout=1.0)
    assert isinstance(first.error, RankHung)
    assert isinstance(second.error, RuntimeError)
    assert not Path(f"/proc/{victim}").exists()
    assert len(pool.run(rank_and_sum, 2, 1.0)) == 2


def test_only_top_level_functions(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="top-level"):
        pool.run(lambda: None, 1)


def test_close_leaves_nothing() -> None:
    own = Pool()
    own.run(rank_and_sum, 2, 1.0)
    pids = own.pids
    own.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
