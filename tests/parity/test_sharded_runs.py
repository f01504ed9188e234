"""Runs whose state is sharded: the same bytes after a kill, evaluations in between, the audit, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_engine import start, whole
from parity_jobs import Case, Stack, build_job
from torch import Tensor, nn

import trimaran as tm
from pool import Pool
from resuming import NEVER, assert_same_run, train
from tiny_job import events_of, losses_of
from trimaran.errors import JobError, LayoutError, NumericsError
from trimaran.run import Run


def stack_job(*, steps: int = 8) -> tm.Job:
    job = build_job(Case("stack", "adamw", epochs=1))
    return replace(job, steps=steps, epochs=None, valid=job.data)


def run_part(run: Path, layout: str, until: int | None, save_every: str = "3steps") -> None:
    train(
        stack_job(), layout, run=run, options=tm.RunOptions(save_every=save_every, evaluate_every="2steps"), until=until
    )


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(2, "zero=1 micro_batch=2"), (2, "zero=3 precision=bf16"), (4, "zero=2 shard=2")]
)
def test_a_killed_run_goes_on_byte_for_byte(pool: Pool, tmp_path: Path, num_ranks: int, layout: str) -> None:
    pool.run(run_part, num_ranks, tmp_path / "whole", layout, None, NEVER)
    pool.run(run_part, num_ranks, tmp_path / "parts", layout, 5)
    pool.run(run_part, num_ranks, tmp_path / "parts", layout, None)
    assert ("resumed", 3) in events_of(tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_sharded_run_is_that_of_one_process(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_part, 2, tmp_path / "two", "zero=3 precision=fp64", None, NEVER)
    run_part(tmp_path / "one", "precision=fp64", None, NEVER)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-12, abs=0)


def gradients_around_an_evaluation(layout: str) -> bool:
    """Whether an evaluation between accumulate and update leaves the gradients alone."""
    engine, loader, _ = start(stack_job(), micro_batch=2, layout=layout)
    batch = next(iter(loader))
    engine.accumulate(batch)
    before = {name: whole(each.grad).clone() for name, each in engine.model.named_parameters() if each.requires_grad}
    engine.evaluate([batch])
    return all(
        torch.equal(whole(each.grad), before[name])
        for name, each in engine.model.named_parameters()
        if each.requires_grad
    )


@pytest.mark.parametrize("layout", ["zero=1", "zero=2", "zero=3"])
def test_an_evaluation_leaves_gradients_alone(pool: Pool, layout: str) -> None:
    assert pool.run(gradients_around_an_evaluation, 2, layout) == [True, True]


def loss_after_an_update(layout: str) -> tuple[float, float]:
    """Of a batch, after an evaluation and an update: by a sharded engine, and by its whole weights."""
    engine, loader, _ = start(stack_job(), layout=layout)
    first, second = list(loader)[:2]
    engine.accumulate(first)
    engine.evaluate([second])
    engine.update()
    plain = Stack().double()
    plain.load_state_dict({name: whole(each).clone() for name, each in engine.model.state_dict().items()})
    loss = engine.evaluate([second])["loss"]
    sums = torch.zeros(2, dtype=torch.float64)
    for each in second.micro_batches:
        if not each.weightless:
            tensors = engine.to_device(each)
            sums += torch.stack([engine.loss.total(plain(tensors["input_ids"]), tensors), engine.loss.weight(tensors)])
    torch.distributed.all_reduce(sums)
    return loss, float(sums[0] / sums[1])


@pytest.mark.parametrize("layout", ["zero=1", "zero=3"])
def test_a_forward_after_an_update_uses_its_weights(pool: Pool, layout: str) -> None:
    for by_engine, by_weights in pool.run(loss_after_an_update, 2, layout):
        assert by_engine == pytest.approx(by_weights, rel=1e-12)


def spoiled_run(run: Path, layout: str, what: str) -> str:
    """What the audit says after one rank's tensor was changed in step 2."""

    def spoil(running: Run) -> None:
        engine = running.engine
        if torch.distributed.get_rank() == 1 and running.last_step == 1:
            parameter = engine.updated["norm.weight"]
            with torch.no_grad():
                target = parameter if what == "model" else engine.optimizer.state[parameter]["exp_avg"]
                target.view(-1)[0] += 1e-3

    try:
        options = tm.RunOptions(save_every=NEVER, audit_every=1)
        train(stack_job(), layout, run=run, options=options, each_step=spoil)
    except NumericsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_ranks", "layout", "what", "said"),
    [
        (2, "", "model", "model.norm.weight on rank 1 differs from that on rank 0 after step 2."),
        (2, "", "optimizer", "optimizer.norm.weight.exp_avg on rank 1 differs from that on rank 0 after step 2."),
        (4, "zero=3 shard=2", "model", "model.norm.weight on rank 3 differs from that on rank 1 after step 2."),
    ],
)
def test_the_audit_names_tensor_and_rank(
    pool: Pool, tmp_path: Path, num_ranks: int, layout: str, what: str, said: str
) -> None:
    for told in pool.run(spoiled_run, num_ranks, tmp_path / "a", layout, what):
        assert told.startswith(said)


def audited_run(run: Path, layout: str) -> None:
    train(stack_job(), layout, run=run, options=tm.RunOptions(save_every=NEVER, audit_every=1))


def test_the_audit_finds_nothing_in_sound_runs(pool: Pool, tmp_path: Path) -> None:
    for index, layout in enumerate(["", "zero=1 shard=2", "zero=3"]):
        pool.run(audited_run, 4, tmp_path / str(index), layout)


class Ways(nn.Module):
    """Takes one of two blocks, as the sample has it."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[int(x[0, 0] > 0)](x)


def ways_job() -> tm.Job:
    signs = [1.0, 1.0, 1.0, -1.0] * 4
    data = [{"x": sign * torch.ones(3), "target": torch.ones(1)} for sign in signs]
    return tm.Job(
        model=Ways,
        data=data,
        inputs=("x",),
        loss=tm.losses.mse(),
        optimizer=tm.optim.sgd(lr=0.1),
        global_batch=2,
        steps=8,
    )


def refusal_of_ways() -> str:
    engine, loader, _ = start(ways_job(), layout="zero=3")
    try:
        for batch in loader:
            engine.step(batch)
        engine.settle()
    except JobError as error:
        return str(error)
    return ""


def test_blocks_that_only_some_samples_use_are_refused(pool: Pool) -> None:
    for told in pool.run(refusal_of_ways, 2):
        assert told.startswith("the ranks used the model's blocks in different orders in step ")


def refusal(layout: str, changes: dict[str, object]) -> str:
    try:
        start(replace(stack_job(), **changes), layout=layout)  # type: ignore[arg-type]
    except (LayoutError, JobError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("num_ranks", "layout", "changes", "said"),
    [
        (1, "zero=1", {}, "zero=1 with dp=1."),
        (
            4,
            "zero=2 shard=3",
            {},
            "shard=3 with dp=4.\nData ranks shard in groups of equal size, of two ranks at least. ",
        ),
        (2, "zero=2 shard=1", {}, "shard=1 with dp=2."),
        (2, "zero=3", {"optimizer": tm.optim.by_reference(torch.optim.Adafactor, lr=1e-3)}, "Adafactor with zero=3."),
        (2, "zero=3", {"blocks": "layers.*"}, "blocks='layers.*' names no module of Stack."),
        (1, "compile=true", {"model": lambda: nn.Linear(2, 2)}, "compile=true, and Linear has no blocks."),
    ],
)
def test_what_cannot_be_is_refused(
    pool: Pool, num_ranks: int, layout: str, changes: dict[str, object], said: str
) -> None:
    told = pool.run(refusal, num_ranks, layout, changes) if num_ranks > 1 else [refusal(layout, changes)]
    assert all(each.startswith(said) for each in told)
