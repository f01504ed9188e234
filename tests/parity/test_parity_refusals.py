"""What a step refuses or skips, alike on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parity_engine import buckets_of, start
from parity_jobs import Case, build_job, token_samples
from parity_plain import optimizer_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimaran as tm
from pool import Pool
from trimaran.errors import JobError


def call_out_of_turn(which: str) -> str:
    engine, loader, _ = start(build_job(Case()))
    first, second = list(loader)[:2]
    if which == "accumulate twice":
        engine.accumulate(first)
    try:
        if which == "accumulate twice":
            engine.accumulate(second)
        else:
            engine.step(first)
            engine.update()
    except JobError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("which", ["accumulate twice", "update alone"])
def test_each_update_follows_one_accumulate(pool: Pool, which: str) -> None:
    for message in pool.run(call_out_of_turn, 2, which):
        assert "accumulate()" in message


def step_on_what_ignores_all(optimizer: str, precision: str) -> tuple[list[bool], list[bool], bool]:
    """Three batches, of which the middle one has no label that counts: skipped, changed; whether its loss is none."""
    some, none = token_samples(6)[:3], token_samples(15)[3::5]
    job = build_job(Case(optimizer=optimizer, precision=precision, global_batch=3))  # type: ignore[arg-type]
    batches = []
    for samples in (some, none, some):
        one = tm.Job(**{**vars(job), "data": samples, "epochs": 1.0})
        engine, loader, _ = start(one, precision=precision, micro_batch=1)  # type: ignore[arg-type]
        batches.append(next(iter(loader)))
    trained = dict(engine.model.named_parameters())
    skipped, changed, losses = [], [], []
    for batch in batches:
        before = {name: each.detach().clone() for name, each in trained.items()}
        state = optimizer_state(engine.optimizer, trained)
        result = engine.step(batch)
        now = optimizer_state(engine.optimizer, trained)
        skipped.append(result.skipped)
        losses.append(result.loss)
        moved = any(not torch.equal(each, before[name]) for name, each in trained.items())
        changed.append(moved or any(not torch.equal(each, state[name]) for name, each in now.items() if name in state))
    return skipped, changed, losses[1] != losses[1]


@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "fp32"), ("sgd", "fp32"), ("sgd", "fp64")])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_batch_in_which_nothing_counts_is_skipped(pool: Pool, dp: int, optimizer: str, precision: str) -> None:
    for skipped, changed, loss_is_none in pool.run(step_on_what_ignores_all, dp, optimizer, precision):
        assert skipped == [False, True, False]
        assert changed == [True, False, True]
        assert loss_is_none


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 11, sparse=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


def step_with_sparse_gradients() -> str:
    job = build_job(Case())
    engine, loader, _ = start(tm.Job(**{**vars(job), "model": lambda: SparseEmbedding()}))
    try:
        engine.step(next(iter(loader)))
    except JobError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dp", [1, 2])
def test_sparse_gradients_are_refused_on_one_rank_as_on_two(pool: Pool, dp: int) -> None:
    for message in pool.run(step_with_sparse_gradients, dp):
        assert "sparse=False" in message


class TwiceUsed(nn.Module):
    """One layer used by two blocks, each recomputed: with reentrant recomputation its gradient comes in two parts."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.shared = nn.Embedding(11, 11), nn.Linear(11, 11)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(2):
            x = checkpoint(lambda x: self.shared(x).tanh(), x, use_reentrant=self.reentrant)
        return x


def step_with_recomputation(reentrant: bool, bucket_bytes: int) -> dict[str, Tensor] | str:
    job = build_job(Case(global_batch=6))
    with buckets_of(bucket_bytes):
        engine, loader, _ = start(tm.Job(**{**vars(job), "model": lambda: TwiceUsed(reentrant)}), micro_batch=2)
    try:
        engine.accumulate(next(iter(loader)))
    except JobError as error:
        dist.barrier()
        return str(error)
    return {name: each.grad.clone() for name, each in engine.model.named_parameters()}


def test_a_gradient_that_comes_in_two_parts_is_refused_or_right(pool: Pool) -> None:
    expected = pool.run(step_with_recomputation, 1, False, 400)[0]
    for reentrant, bucket_bytes in ((False, 50), (True, 8 * 2**20)):
        for gradients in pool.run(step_with_recomputation, 2, reentrant, bucket_bytes):
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-15)
    # In buckets of their own the first part has left already.
    for message in pool.run(step_with_recomputation, 2, True, 50):
        assert "use_reentrant=False" in message


def backward_between_steps() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A caller's own backward between two steps, as for a saliency map, disturbs neither."""
    weights = []
    for own_backward in (False, True):
        engine, loader, _ = start(build_job(Case()), micro_batch=2)
        for batch in list(loader)[:2]:
            engine.step(batch)
            if own_backward:
                engine.model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
        weights.append({name: each.detach().clone() for name, each in engine.model.named_parameters()})
    return weights[0], weights[1]


def test_a_backward_between_steps_is_the_callers_own(pool: Pool) -> None:
    for undisturbed, disturbed in pool.run(backward_between_steps, 2):
        assert all(torch.equal(each, disturbed[name]) for name, each in undisturbed.items())
