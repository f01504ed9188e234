"""Experiment trackers, fed from the same records as the run directory, through their own clients.

Each is an extra of this package (`tensorboard`, `wandb`, `mlflow`) and reads its own configuration, such as
WANDB_MODE or MLFLOW_TRACKING_URI, as its users know it. A tracker that fails during a run is dropped, aloud: it must
not end a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trimaran.errors import RunError
from trimaran.options import Tracker
from trimaran.records import RunRecord, StepRecord

_PROJECT = "trimaran"
_MLFLOW_TAG = "trimaran_run_id"


class TrackerClient(Protocol):
    """What a tracker must do; called on rank 0 only."""

    def log(self, figures: Mapping[str, float], step: int, /) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers of one run. `warn` receives a sentence when one is dropped."""

    def __init__(self, clients: Mapping[str, TrackerClient], warn: Callable[[str], None]) -> None:
        self._clients = dict(clients)
        self._warn = warn

    def log(self, record: StepRecord) -> None:
        """Hands a step's figures to every tracker."""
        figures = step_figures(record)
        for name, client in list(self._clients.items()):
            try:
                client.log(figures, record.step)
            except Exception as problem:
                del self._clients[name]
                self._warn(f"{name} failed at step {record.step} and is left out from here on: {problem}")

    def close(self) -> None:
        """Lets every tracker finish what it has."""
        for client in self._clients.values():
            with suppress(Exception):
                client.close()


def step_figures(record: StepRecord) -> dict[str, float]:
    """The record under the names that trackers group by: "train/loss", "valid/accuracy"."""
    figures = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/weight": record.weight,
        "train/skipped": float(record.skipped),
    }
    return figures | {f"valid/{name}": value for name, value in (record.validation or {}).items()}


def open_trackers(
    names: Sequence[Tracker], record: RunRecord, directory: Path, warn: Callable[[str], None], first_step: int = 0
) -> Trackers:
    """Starts the named trackers; on rank 0 only. A run that continues goes on in each, after `first_step`.

    Raises RunError where a client is not installed, or refuses to start.
    """
    openers: dict[Tracker, Callable[[RunRecord, Path], TrackerClient]] = {
        "tensorboard": partial(_TensorBoard, first_step=first_step),
        "wandb": _WandB,
        "mlflow": _MLflow,
    }
    clients: dict[str, TrackerClient] = {}
    for name in names:
        try:
            clients[name] = openers[name](record, directory)
        except ImportError as problem:
            raise RunError(
                f"track={name}, and its client is not installed ({problem}).",
                "Trackers are extras.",
                f"Install the extra {name} of trimaran, or leave it out.",
            ) from problem
        except Exception as problem:
            raise RunError(
                f"{name} did not start: {type(problem).__name__}: {problem}",
                "A tracker that was asked for must be there from the first step.",
                f"Configure it as {name} documents, or leave it out.",
            ) from problem
    return Trackers(clients, warn)


def _settings(record: RunRecord) -> dict[str, Any]:
    """What a run was made of, flat, for a tracker's table of runs."""
    arguments = {f"job/{name}": value for name, value in record.identity.get("arguments", {}).items()}
    derived = {name: each.value for name, each in record.derived.items()}
    return arguments | derived | {"layout": record.layout, "global_batch": record.identity["global_batch"]}


class _TensorBoard:
    def __init__(self, record: RunRecord, directory: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start logged beyond its last checkpoint is made again.
        purge_step = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("run", "\n".join(f"- {name}: {value}" for name, value in _settings(record).items()))

    def log(self, figures: Mapping[str, float], step: int, /) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, record: RunRecord, directory: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=_PROJECT,
            id=record.id,
            resume="allow",
            name=directory.name,
            dir=str(directory),
            config=_settings(record),
            allow_val_change=True,  # a run may continue in another layout
            reinit="create_new",
        )

    def log(self, figures: Mapping[str, float], step: int, /) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, record: RunRecord, directory: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client = MlflowClient()
        self._metric = Metric
        experiment = self._client.get_experiment_by_name(_PROJECT)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(_PROJECT)
        known = self._client.search_runs([experiment_id], filter_string=f"tags.{_MLFLOW_TAG} = '{record.id}'")
        if known:  # continued; parameters of a run in MLflow are set once
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        made = self._client.create_run(experiment_id, run_name=directory.name, tags={_MLFLOW_TAG: record.id})
        self._run_id = made.info.run_id
        params = [Param(name, str(value)) for name, value in _settings(record).items()]
        self._client.log_batch(self._run_id, params=params)

    def log(self, figures: Mapping[str, float], step: int, /) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
