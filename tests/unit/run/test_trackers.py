"""Trackers receive the run's own records, through their real clients, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimaran.errors import RunError, UsageError
from trimaran.options import RunOptions
from trimaran.records import Derived, RunRecord, StepRecord
from trimaran.run import trackers
from trimaran.run.trackers import open_trackers

STEPS = [
    StepRecord(step=1, loss=2.5, weight=8.0, grad_norm=1.0, lr=0.1),
    StepRecord(step=2, loss=2.0, weight=8.0, grad_norm=0.5, lr=0.1, validation={"loss": 2.25, "accuracy": 0.5}),
]


def record() -> RunRecord:
    return RunRecord(
        name="tiny",
        id="0f",
        identity={"arguments": {"width": 8}, "global_batch": 4},
        layout="dp=1",
        options={},
        derived={"lr": Derived(0.1, "as given")},
        machine={},
        versions={},
    )


def run_with(name: str, directory: Path) -> list[str]:
    directory.mkdir()
    warnings: list[str] = []
    opened = open_trackers((name,), record(), directory, warnings.append)  # type: ignore[arg-type]
    for step in STEPS:
        opened.log(step)
    opened.close()
    return warnings


def test_tensorboard_has_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run_with("tensorboard", tmp_path / "a") == []
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.0)]
    assert [(each.step, each.value) for each in events.Scalars("valid/accuracy")] == [(2, 0.5)]


def test_wandb_offline_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run_with("wandb", tmp_path / "b") == []
    assert list((tmp_path / "b").glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_file_store_has_figures_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'store'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    assert run_with("mlflow", tmp_path / "c") == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("trimaran")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["job/width"] == "8"
    assert run.data.metrics["valid/loss"] == 2.25
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (1, 2.5),
        (2, 2.0),
    ]


def test_a_client_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise ImportError("No module named 'wandb'")

    monkeypatch.setattr(trackers, "_WandB", missing)
    with pytest.raises(RunError, match="Install the extra wandb"):
        run_with("wandb", tmp_path / "d")


def test_a_client_that_does_not_start_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise ConnectionError("no server")

    monkeypatch.setattr(trackers, "_MLflow", broken)
    with pytest.raises(RunError, match="mlflow did not start: ConnectionError: no server"):
        run_with("mlflow", tmp_path / "e")


def test_a_client_that_fails_later_is_dropped_aloud_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flaky:
        def __init__(self, *_: object, first_step: int) -> None: ...

        def log(self, *_: object) -> None:
            raise OSError("disk full")

        def close(self) -> None: ...

    monkeypatch.setattr(trackers, "_TensorBoard", Flaky)
    (warning,) = run_with("tensorboard", tmp_path / "f")
    assert "tensorboard failed at step 1" in warning
    assert "disk full" in warning


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(UsageError, match="track='tensorbord' is unknown"):
        RunOptions(track=("tensorbord",))  # type: ignore[arg-type]
