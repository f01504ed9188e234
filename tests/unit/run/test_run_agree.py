"""What ranks agree on: the resolved job, first weights, refusals, and when to stop."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pool import Pool
from trimaran.errors import RunError, TrimaranError
from trimaran.layout import Layout
from trimaran.run.agree import agree_on_job, agree_on_weights, on_first_rank
from trimaran.run.decide import Agreement
from trimaran.world.groups import World, join_default_group


def _world() -> World:
    layout = Layout().resolve(world_size=dist.get_world_size(), global_batch=8)
    return join_default_group(layout, torch.device("cpu"))


def _said(action: Any) -> str:
    try:
        action()
    except TrimaranError as error:
        return error.value
    return ""


def differing_jobs(of_ranks: list[dict[str, Any]]) -> str:
    world = _world()
    return _said(lambda: agree_on_job(world, of_ranks[world.rank]))


def test_the_first_difference_is_named_on_every_rank(pool: Pool) -> None:
    same: dict[str, Any] = {"seed": 1, "data": {"length": 3, "fingerprint": "x"}}
    assert pool.run(differing_jobs, 3, [same, same, same]) == ["", "", ""]
    other = same | {"data": {"length": 4, "fingerprint": "y"}}
    said = "rank 0 has data.length=3 and rank 2 has data.length=4."
    assert pool.run(differing_jobs, 3, [same, same, other]) == [said] * 3
    assert pool.run(differing_jobs, 2, [same, dict(reversed(same.items()))]) == ["", ""], "an order is no difference"
    assert pool.run(differing_jobs, 2, [same, {"seed": 1}])[1].startswith("rank 0 has data={")


def differing_weights(names: list[str]) -> str:
    world = _world()
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.BatchNorm1d(2)})
    for each in model.state_dict().values():
        each.zero_()
    if world.rank == 1:
        for name in names:
            model.state_dict()[name].view(-1)[-1] = 1
    return _said(lambda: agree_on_weights(world, model))


def test_first_weights_and_buffers_are_compared(pool: Pool) -> None:
    assert pool.run(differing_weights, 2, []) == ["", ""]
    for name in ("a.weight", "b.running_mean", "b.num_batches_tracked"):
        assert (
            pool.run(differing_weights, 2, [name]) == [f"{name} has other first values on rank 1 than on rank 0."] * 2
        )


def refused_on_rank_0(refuse: bool) -> tuple[str, list[int]]:
    world = _world()
    ran: list[int] = []

    def action() -> int:
        ran.append(world.rank)
        if refuse:
            raise RunError("a is taken.", "One writer.", "Wait.")
        return 7

    said = _said(lambda: ran.append(on_first_rank(world, action) or 0))
    return said, ran


def test_rank_0_acts_and_its_refusal_is_everybodys(pool: Pool) -> None:
    assert pool.run(refused_on_rank_0, 2, False) == [("", [0, 7]), ("", [0])]
    assert pool.run(refused_on_rank_0, 2, True) == [("a is taken.", [0]), ("a is taken.", [])]


def agreed_stop(rank_to_stop: int) -> tuple[float, int, bool]:
    world = _world()
    weight = torch.tensor(0.5 + world.rank, dtype=torch.float64)
    decision = Agreement(world, weight=weight, num_tokens=10 * world.rank, stop=world.rank == rank_to_stop).settle()
    return decision.weight, decision.num_tokens, decision.stop


def test_one_rank_that_is_asked_to_stop_stops_all(pool: Pool) -> None:
    assert pool.run(agreed_stop, 3, 2) == [(4.5, 30, True)] * 3
    assert pool.run(agreed_stop, 3, 9) == [(4.5, 30, False)] * 3


def texts(of_ranks: list[str]) -> list[str]:
    world = _world()
    return world.gather_text(of_ranks[world.rank])


def test_texts_of_any_length_are_gathered(pool: Pool) -> None:
    for of_ranks in (["", ""], ["a", ""], ["ü" * 1000, "x", "雪"]):
        assert pool.run(texts, len(of_ranks), of_ranks) == [of_ranks] * len(of_ranks)
