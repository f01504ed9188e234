"""What is trained: the `Job`, and the small protocols its parts keep. No torch at import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from trimaran.errors import JobError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Batch = Mapping[str, Tensor]
    """A sample's dict with a leading batch dimension."""


@runtime_checkable
class Source(Protocol):
    """A map-style collection of samples; torch and Hugging Face datasets are sources as they are.

    Optional on a source: `fingerprint() -> str` (identifies the content, so that a run is not continued
    on other data) and `collate(samples) -> batch` (used where the job gives none).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Loss(Protocol):
    """A sum over samples or tokens, and the weight it is divided by. Metrics keep the same protocol.

    `weight` sees no model output: it is summed over the global batch before the first forward.
    Both return scalars; `total` keeps the graph.
    """

    def weight(self, batch: Batch, /) -> Tensor: ...

    def total(self, output: Any, batch: Batch, /) -> Tensor: ...


@dataclass(frozen=True)
class ScaledRate:
    """A learning rate, and the sentence that says where it comes from."""

    value: float
    reason: str


@runtime_checkable
class OptimizerBuilder(Protocol):
    """Describes an optimizer; builds it once the parameters exist."""

    def rate(self, global_batch: int, /) -> ScaledRate:
        """The learning rate at this global batch (the scaling rule applied)."""
        ...

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float, /) -> torch.optim.Optimizer:
        """An optimizer over the parameters that require a gradient, grouped by name."""
        ...

    def describe(self) -> str:
        """A line such as "adamw(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)", stable over runs."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """Describes a learning-rate schedule; resolves to a factor for each update."""

    def resolve(self, *, total_steps: int, steps_per_epoch: float) -> Callable[[int], float]:
        """`factor(update)`, with updates counted from 0; multiplies every group's rate."""
        ...

    def describe(self, *, total_steps: int, steps_per_epoch: float) -> str:
        """A line such as "cosine to 0.1, 50 warm-up steps"."""
        ...


@dataclass(frozen=True)
class _ConstantRate:
    """The schedule of a job that names none: the rate stays as it is."""

    def resolve(self, *, total_steps: int, steps_per_epoch: float) -> Callable[[int], float]:
        return lambda update: 1.0

    def describe(self, *, total_steps: int, steps_per_epoch: float) -> str:
        return "constant"


@dataclass(frozen=True)
class Weights:
    """First weights from safetensors: a file, or a folder with one file or with several and their index.

    `rename` maps names in the file to names in the model; a `*` stands for the same text in both, and None leaves the
    tensor out. `partial` allows names to be missing from the file (those tensors keep their first values) or from the
    model: those that match one of the patterns, such as ("fc.*",), or all of them with True. What was left aside is
    printed. Shapes are never allowed to differ.
    """

    path: str | Path
    rename: Mapping[str, str | None] = field(default_factory=dict)
    partial: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        if isinstance(self.partial, str):
            raise JobError(
                f"partial={self.partial!r} is a string.", "It lists patterns.", f"Write partial=({self.partial!r},)."
            )
        for theirs, ours in self.rename.items():
            if theirs.count("*") > 1 or (ours is not None and ours.count("*") != theirs.count("*")):
                raise JobError(
                    f"rename maps {theirs!r} to {ours!r}.",
                    "A name has at most one *, which stands for the same text on both sides.",
                    'Write, for example, {"encoder.*": "backbone.*"}.',
                )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, in plain single-device terms. Knows nothing of ranks, devices or degrees.

    A sample is a dict of tensors, or what the data gives, turned into a batch by `collate`. The model is called
    with the batch's keys named in `inputs`, as keywords (or, given a mapping, parameter name -> batch key).
    Exactly one of `steps` and `epochs` says how long. Raises JobError for a value that cannot be meant.
    """

    model: Callable[[], nn.Module]
    data: Source
    loss: Loss
    optimizer: OptimizerBuilder
    global_batch: int
    inputs: Sequence[str] | Mapping[str, str] = ("input_ids",)
    steps: int | None = None
    epochs: float | None = None
    valid: Source | None = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    schedule: Schedule = _ConstantRate()
    clip: float | None = None
    collate: Callable[[list[Any]], Any] | None = None
    seed: int = 0
    init: Literal["whole", "by_name"] = "whole"
    """How first weights are made: "whole" runs the constructor under the seed, as in plain PyTorch; "by_name" replays
    it for one tensor at a time, each under (seed, name), for models larger than a host's memory. Other values."""
    weights: Weights | str | Path | None = None
    """Pretrained weights, in place of the constructor's."""
    name: str = ""
    """Short name of the run; the command line takes the job file's."""
    sample: Callable[[nn.Module], str] | None = None
    """Called with the trained model on its device: what is printed at the end, such as generated text. On rank 0, and
    where the model is cut over ranks on all of them, under the same seed."""
    baselines: Mapping[str, Callable[[], Mapping[str, float]]] = field(default_factory=dict)
    """Name -> the figures ("loss", or a metric's name) of something simple on the same data, printed beside ours."""
    blocks: str | None = None
    """The model's repeated parts, which are sharded, recomputed and compiled one by one, as a glob over module names,
    such as "layers.*"; None takes the entries of its ModuleLists."""
    chain: Sequence[str] | None = None
    tp_plan: Mapping[str, Any] | None = None
    """How layouts with tp cut the model: globs over module names -> "colwise", "rowwise", "vocab" or "sequence", or
    tm.colwise(heads=..., parts=...). Hugging Face's base_model_tp_plan is one. What no glob names is replicated."""

    def __post_init__(self) -> None:
        self._check_callables()
        self._check_numbers()
        if self.init not in ("whole", "by_name"):
            raise JobError(f"init={self.init!r} is unknown.", 'It is "whole" or "by_name".', 'Use init="whole".')
        if "/" in self.name or "\0" in self.name or self.name in (".", ".."):
            raise JobError(
                f"name={self.name!r} is no file name.", "Runs without --run are named after it.", 'Use one like "gpt".'
            )
        if isinstance(self.inputs, str):
            raise JobError(
                f"inputs={self.inputs!r} is a string.",
                "It names several batch keys.",
                f"Write inputs=({self.inputs!r},).",
            )

    def _check_callables(self) -> None:
        is_module = hasattr(self.model, "parameters") and not isinstance(self.model, type)
        if not callable(self.model) or is_module:
            raise JobError(
                f"model={type(self.model).__name__} is not a function that builds a model.",
                "The engine decides when and where weights are made.",
                "Write model=lambda: MyModel(...).",
            )
        for name, source in (("data", self.data), ("valid", self.valid)):
            if (name == "data" or source is not None) and not isinstance(source, Source):
                raise JobError(
                    f"{name}={type(source).__name__} has no __len__ and __getitem__.",
                    "A source is map-style: its order is a function of (seed, position).",
                    "Wrap it in a torch Dataset, or write its samples to disk first.",
                )
        if "loss" in self.metrics:
            raise JobError(
                "metrics has one named 'loss'.",
                "An evaluation gives the job's loss under that name.",
                "Give the metric another name.",
            )
        for name, loss in {"loss": self.loss, **self.metrics}.items():
            if not isinstance(loss, Loss):
                raise JobError(
                    f"{name}={type(loss).__name__} has no weight(batch) and total(output, batch).",
                    "A loss is a sum and the weight it is divided by, so that any cut of a batch gives the same value.",
                    "Use trimaran.losses, or tm.losses.custom(total=..., weight=...).",
                )
        for name, part, kind, instead in (
            ("optimizer", self.optimizer, OptimizerBuilder, "tm.optim.adamw(lr=...)"),
            ("schedule", self.schedule, Schedule, "tm.optim.cosine(warmup=0.05)"),
        ):
            if not isinstance(part, kind):
                raise JobError(
                    f"{name}={type(part).__name__} is not a description of the {name}.",
                    "It is built after the model's weights exist, on each rank.",
                    f"Write {name}={instead}.",
                )

    def _check_numbers(self) -> None:
        if not _is_int(self.global_batch) or self.global_batch < 1:
            raise JobError(
                f"global_batch={self.global_batch!r}.",
                "It counts the samples of one optimizer step, over all ranks.",
                "Give a whole number from 1.",
            )
        if (self.steps is None) == (self.epochs is None):
            raise JobError(
                f"steps={self.steps} and epochs={self.epochs}.",
                "Exactly one of them says how long the job trains.",
                "Give one, drop the other.",
            )
        if self.steps is not None and (not _is_int(self.steps) or self.steps < 1):
            raise JobError(f"steps={self.steps!r}.", "Steps are counted from 1.", "Give a whole number from 1.")
        if self.epochs is not None and not (_is_number(self.epochs) and 0 < self.epochs < math.inf):
            raise JobError(f"epochs={self.epochs!r}.", "A run has some length, and an end.", "Give a positive number.")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise JobError(
                f"clip={self.clip!r}.", "It is the largest global gradient norm.", "Give a positive number, or None."
            )
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise JobError(f"seed={self.seed!r}.", "A seed is a whole number in [0, 2^63).", "Give one, such as 0.")

    def with_overrides(self, *, steps: int | None, seed: int | None, global_batch: int | None) -> Job:
        """This job with the command line's --steps, --seed and --global-batch; None keeps the job's own."""
        changes: dict[str, Any] = {}
        if steps is not None:
            changes |= {"steps": steps, "epochs": None}
        if seed is not None:
            changes["seed"] = seed
        if global_batch is not None:
            changes["global_batch"] = global_batch
        return replace(self, **changes) if changes else self

    @property
    def weights_in(self) -> Weights | None:
        """`weights`, with a bare path as the whole model's weights."""
        return Weights(self.weights) if isinstance(self.weights, (str, Path)) else self.weights

    @property
    def input_keys(self) -> Mapping[str, str]:
        """Model parameter name -> batch key."""
        return self.inputs if isinstance(self.inputs, Mapping) else {key: key for key in self.inputs}

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in one pass over the data; not whole where the batch does not divide it."""
        return len(self.data) / self.global_batch

    @property
    def total_samples(self) -> int:
        """Samples the whole run sees, counted as often as they are seen."""
        if self.steps is not None:
            return self.steps * self.global_batch
        assert self.epochs is not None
        return max(1, round(self.epochs * len(self.data)))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; the last one of a run given in epochs may be partial."""
        return math.ceil(self.total_samples / self.global_batch)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
