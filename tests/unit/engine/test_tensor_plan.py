"""Which layers a tensor-parallel plan means, and the plans that are refused: value, rule and remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trimaran as tm
from trimaran.engine.tensor import deal, undeal
from trimaran.engine.tensor_match import match_plan, part_sizes
from trimaran.errors import JobError, LayoutError
from trimaran.layout import Layout
from trimaran.tensor_plan import Colwise, DealtRows, Rowwise, Vocab

PLAN: dict[str, Any] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 24), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 18), nn.Linear(18, 12)


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_globs_are_over_whole_names() -> None:
    assert match_plan(Model(), PLAN, 2) == {
        "blocks.0.up": Colwise(),
        "blocks.0.down": Rowwise(),
        "blocks.1.up": Colwise(),
        "blocks.1.down": Rowwise(),
    }


def test_globs_of_a_part_of_the_model_mean_the_ends_of_names() -> None:
    whole = nn.ModuleDict({"model": Model()})
    assert list(match_plan(whole, PLAN, 2)) == [
        f"model.blocks.{index}.{name}" for index in (0, 1) for name in ("up", "down")
    ]


def test_a_head_tied_to_a_cut_embedding_is_cut_too() -> None:
    assert match_plan(Model(tied=True), {**PLAN, "embed": "vocab"}, 2)["head"] == Vocab()
    assert "head" not in match_plan(Model(), {**PLAN, "embed": "vocab"}, 2)


def test_sizes_of_parts() -> None:
    qkv = nn.Linear(12, 24)
    assert part_sizes(qkv, tm.colwise(heads=4, parts=3)) == (8, 8, 8)
    assert part_sizes(qkv, tm.colwise(heads=4, kv_heads=2, parts=3)) == (12, 6, 6)


def test_dealt_rows_come_back() -> None:
    order = DealtRows((6, 2, 2), 2)
    rows = torch.arange(10)
    dealt = deal(rows, order)
    assert dealt.tolist() == [0, 1, 2, 6, 8, 3, 4, 5, 7, 9]
    assert torch.equal(undeal(dealt, order), rows)
    assert list(order.runs(2, 6)) == [(0, 2, 1), (1, 6, 1), (2, 8, 1), (3, 3, 1)]


def refusal(plan: Any, tp: int = 2, model: nn.Module | None = None) -> str:
    with pytest.raises((LayoutError, JobError)) as caught:
        match_plan(model or Model(), plan, tp)
    return str(caught.value)


QKV = "blocks.*.qkv"


@pytest.mark.parametrize(
    ("plan", "tp", "said"),
    [
        (None, 2, "tp=2, and the job has no tp_plan."),
        ({}, 2, "tp=2, and the job has no tp_plan."),
        (PLAN | {"layers.*.up": "colwise"}, 2, "tp_plan['layers.*.up'] names no module of Model."),
        (PLAN | {"blocks.*.out": "colwize"}, 2, "Did you mean 'colwise'?"),
        (PLAN | {"blocks.0.up": "rowwise"}, 2, "tp_plan declares blocks.0.up twice"),
        (PLAN | {"blocks.1.up": tm.colwise(heads=3)}, 3, "tp_plan declares blocks.1.up twice"),
        (PLAN | {"blocks": "colwise"}, 2, "tp_plan declares blocks as colwise, and it is ModuleList."),
        (PLAN | {"embed": "rowwise"}, 2, "tp_plan declares embed as rowwise, and it is Embedding."),
        ({"blocks.*.up": "colwise"}, 2, "declares blocks.0.up as colwise, and no layer of blocks.0 as rowwise."),
        ({"blocks.*.down": "rowwise"}, 2, "declares blocks.0.down as rowwise, and no layer of blocks.0 as colwise."),
        (PLAN, 4, "tp=4 does not divide the 18 outputs of blocks.0.up."),
        ({**PLAN, QKV: tm.colwise(heads=4, parts=3), "blocks.*.out": "rowwise"}, 3, "the 4 heads of blocks.0.qkv."),
        (
            {**PLAN, QKV: tm.colwise(heads=6, kv_heads=3, parts=3), "blocks.*.out": "rowwise"},
            2,
            "tp=2 does not divide the 3 key-value heads of blocks.0.qkv.",
        ),
        ({**PLAN, QKV: tm.colwise(parts=7), "blocks.*.out": "rowwise"}, 2, "24 outputs, which are not 7 parts."),
        (PLAN | {"embed": "vocab"}, 6, "tp=6 leaves a rank without one of the 7 entries of embed."),
    ],
)
def test_plans_that_do_not_fit(plan: Any, tp: int, said: str) -> None:
    assert said in refusal(plan, tp)


def test_the_remedy_names_the_degrees_that_fit() -> None:
    assert "Use tp in {1, 2, 4}." in refusal({**PLAN, QKV: tm.colwise(heads=4, parts=3), "blocks.*.out": "rowwise"}, 3)


def test_heads_that_only_the_config_knows() -> None:
    model = Model()
    model.attn = Block()
    model.config = type("Config", (), {"num_attention_heads": 12, "num_key_value_heads": 3})()
    plan = {"attn.qkv": "colwise", "attn.out": "rowwise"}
    assert "tp=2 does not divide the 3 key-value heads of attn.qkv." in refusal(plan, 2, model)


def test_embeddings_that_do_more_than_look_up() -> None:
    model = Model()
    model.embed = nn.Embedding(7, 12, max_norm=1.0)
    assert "embed is an embedding with max_norm" in refusal({**PLAN, "embed": "vocab"}, 2, model)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 0},
        {"parts": True},
        {"kv_heads": 2},
        {"heads": 4, "kv_heads": 3},
        {"heads": 4, "kv_heads": 2, "parts": 2},
    ],
)
def test_counts_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        tm.colwise(**options)


def test_sp_without_tp() -> None:
    with pytest.raises(LayoutError, match=r"sp=true with tp=1\."):
        Layout.parse("sp=true")
