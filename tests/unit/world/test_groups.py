from __future__ import annotations

import torch
import torch.distributed as dist

from pool import Pool
from trimaran.layout import Layout
from trimaran.world.groups import World, close_world, join_default_group, open_world


def _world() -> World:
    layout = Layout().resolve(world_size=dist.get_world_size(), global_batch=8)
    return join_default_group(layout, torch.device("cpu"))


def test_alone_every_collective_is_the_identity() -> None:
    world = open_world(None, Layout().resolve(world_size=1, global_batch=8), device="cpu")
    assert (world.rank, world.size, world.backend, world.leads_data_rank) == (0, 1, "none", True)
    values = torch.tensor([1.5])
    assert world.agree(values) is values
    assert world.agree_later(values) is None
    assert world.gather_text("ü") == ["ü"]
    assert [world.group(axis) for axis in ("pp", "dp", "tp")] == [None, None, None]
    world.barrier()
    close_world()
    close_world()


def collectives() -> tuple[float, float, float, list[str], int, bool]:
    world = _world()
    rank = torch.tensor([float(world.rank)], dtype=torch.float64)
    later = torch.tensor([1.0 + world.rank])
    work = world.agree_later(later)
    assert work is not None
    work.wait()
    group = world.group("dp")
    assert group is not None
    assert world.group("tp") is None
    world.barrier()
    return (
        float(world.agree(rank.clone())),
        float(world.agree(rank.clone(), op=dist.ReduceOp.MAX)),
        float(later),
        world.gather_text("ü\udcff" * world.rank),  # as of a path that is no UTF-8
        group.size(),
        world.leads_data_rank,
    )


def test_every_rank_gets_the_same(pool: Pool) -> None:
    assert pool.run(collectives, 3) == [(3.0, 2.0, 6.0, ["", "ü\udcff", "ü\udcff" * 2], 3, True)] * 3


def places() -> tuple[int, int, str]:
    world = _world()
    return world.place.dp, world.size, world.backend


def test_each_rank_has_its_place(pool: Pool) -> None:
    assert pool.run(places, 2) == [(0, 2, "gloo"), (1, 2, "gloo")]
