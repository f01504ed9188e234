"""State that would not come back is refused when its names are taken, before a step is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trimaran.checkpoint.state import StateNames
from trimaran.errors import CheckpointError


class Cast(nn.Linear):
    """Gives its weights to be saved in another type, as some published models do."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].half()


def test_a_model_that_gives_copies_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), Cast(3, 2))
    with pytest.raises(CheckpointError, match=r"the model's state_dict\(\) gives copies: 1\.weight\."):
        StateNames(model, torch.optim.SGD(model.parameters(), lr=0.1)).collect()


def test_views_and_tied_tensors_are_no_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    whole = torch.randn(8)
    model[0].bias = nn.Parameter(whole[:2])
    model[1].bias = nn.Parameter(whole[2:4])
    state = StateNames(model, torch.optim.SGD(model.parameters(), lr=0.1)).collect()
    assert "model.1.bias" in state.tensors


class Averaged(torch.optim.SGD):
    """Keeps something that only its own state_dict knows."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": torch.zeros(3)}


def test_an_optimizer_that_keeps_more_than_its_state_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="Averaged keeps average beside its state and param_groups"):
        StateNames(model, Averaged(model.parameters(), lr=0.1)).collect()
