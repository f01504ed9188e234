from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import trimaran as tm
from trimaran.errors import JobError
from trimaran.job import Job


def build(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": lambda: None,
        "data": [1, 2, 3],
        "loss": tm.losses.mse(),
        "optimizer": tm.optim.adamw(lr=1e-3),
        "global_batch": 2,
        "steps": 5,
    }
    return Job(**values | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": 3}, "model=int is not a function"),
        ({"data": iter([])}, "data=list_iterator has no __len__ and __getitem__."),
        ({"data": None}, "data=NoneType has no __len__ and __getitem__."),
        ({"valid": 3}, "valid=int has no __len__"),
        ({"loss": lambda output, batch: 0}, "loss=function has no weight(batch) and total(output, batch)."),
        ({"metrics": {"accuracy": 3}}, "accuracy=int has no weight(batch)"),
        ({"optimizer": dict}, "optimizer=type is not a description of the optimizer."),
        ({"schedule": 3}, "schedule=int is not a description of the schedule."),
        ({"name": "../a"}, "name='../a' is no file name."),
        ({"global_batch": 0}, "global_batch=0."),
        ({"global_batch": 2.0}, "global_batch=2.0."),
        ({"global_batch": True}, "global_batch=True."),
        ({"steps": None}, "steps=None and epochs=None."),
        ({"epochs": 1.0}, "steps=5 and epochs=1.0."),
        ({"steps": 0}, "steps=0."),
        ({"steps": 1.5}, "steps=1.5."),
        ({"steps": None, "epochs": 0}, "epochs=0."),
        ({"steps": None, "epochs": float("nan")}, "epochs=nan."),
        ({"steps": None, "epochs": float("inf")}, "epochs=inf."),
        ({"steps": None, "epochs": "1"}, "epochs='1'."),
        ({"metrics": {"loss": tm.losses.mse()}}, "metrics has one named 'loss'."),
        ({"clip": "1"}, "clip='1'."),
        ({"clip": 0}, "clip=0."),
        ({"clip": -1.0}, "clip=-1.0."),
        ({"seed": -1}, "seed=-1."),
        ({"seed": 2**63}, "seed=9223372036854775808."),
        ({"seed": "1"}, "seed='1'."),
        ({"init": "random"}, "init='random' is unknown."),
        ({"inputs": "input_ids"}, "inputs='input_ids' is a string."),
    ],
)
def test_refused_jobs(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as caught:
        build(**changes)
    assert caught.value.value.startswith(said)
    assert caught.value.rule
    assert caught.value.remedy


def test_a_model_in_place_of_its_builder_is_refused() -> None:
    from torch import nn

    with pytest.raises(JobError, match="model=Linear is not a function that builds a model"):
        build(model=nn.Linear(1, 1))


def test_lengths() -> None:
    assert (build().total_steps, build().total_samples, build().steps_per_epoch) == (5, 10, 1.5)
    assert [build(steps=None, epochs=each).total_samples for each in (0.1, 1, 1.5, 2)] == [1, 3, 4, 6]
    assert [build(steps=None, epochs=each).total_steps for each in (0.1, 1, 2)] == [1, 2, 3]


def test_overrides() -> None:
    job = build(steps=None, epochs=2.0, seed=1)
    assert job.with_overrides(steps=None, seed=None, global_batch=None) is job
    other = job.with_overrides(steps=7, seed=0, global_batch=3)
    assert (other.steps, other.epochs, other.seed, other.global_batch) == (7, None, 0, 3)
    with pytest.raises(JobError, match=r"steps=0\."):
        job.with_overrides(steps=0, seed=None, global_batch=None)


def test_inputs_are_names_or_a_mapping() -> None:
    assert build(inputs=("a", "b")).input_keys == {"a": "a", "b": "b"}
    assert build(inputs={"x": "pixels"}).input_keys == {"x": "pixels"}


def test_nouns_need_no_torch() -> None:
    code = (
        "import sys, trimaran as tm; tm.Job, tm.Layout(), tm.RunOptions(), tm.Cluster; "
        "import trimaran.records, trimaran.phases, trimaran.batch; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_public_face_names_what_it_has() -> None:
    assert all(hasattr(tm, name) for name in tm.__all__)
    assert set(tm.__all__) <= set(dir(tm))
    with pytest.raises(AttributeError, match="no attribute 'jobb'; it has"):
        tm.jobb  # noqa: B018
