"""Jobs that hold all that a checkpoint must carry, and runs of them that are left in the middle and begun again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran as tm
import trimaran.run.assemble as assemble
from trimaran.checkpoint import Lineage, checkpoint_folder, list_steps, open_checkpoint, read_checkpoint, verify_files
from trimaran.layout import Precision
from trimaran.records import METRICS_FILE, RUN_FILE, WEIGHTS_FILE, StateRecord, read_run
from trimaran.run import Run
from trimaran.world.environment import WorkerEnvironment
from trimaran.world.groups import join_default_group

WIDTH = 6
NEVER = "1000steps"  # saves at the end alone


class Rows(torch.utils.data.Dataset):
    """A regression whose rows are disturbed anew each time that they are fetched."""

    def __init__(self, count: int, seed: int = 0, outlier: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        if outlier:
            self.y[1] = outlier

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        strength = 0.1 * random.random() + 0.1 * float(np.random.rand())
        return {"x": self.x[index] + strength * torch.randn(8), "y": self.y[index], "id": torch.tensor(index)}


class Counter(nn.Module):
    """Scales by how often it was called in training, which it keeps as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return x * (1 + 0.01 * self.count)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


class Zoo(nn.Module):
    """Dropout, running statistics, extra state; parameters tied, frozen, unused, scalar, complex, and oddly strided."""

    def __init__(self, *, is_complex: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, WIDTH, 2, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.turned = nn.Linear(WIDTH, WIDTH)
        self.turned.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH).t())
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.down.weight = self.up.weight
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.gain = nn.Parameter(torch.tensor(1.0))
        if is_complex:
            self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.counter = Counter()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x.view(-1, 2, 2, 2)).flatten(1))
        x = F.dropout(self.turned(x).tanh(), 0.2, self.training) * self.frozen
        x = x + self.down(self.up(x)).tanh() * self.gain
        if hasattr(self, "phase"):
            x = x + (x * self.phase).real
        return self.head(self.counter(x))


class Nested(torch.optim.Optimizer):
    """An optimizer with all kinds of state: nested tensors and plain values, by parameter, by group, and shared."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "is_warm": False})
        for group in self.param_groups:
            group["history"] = [torch.zeros(()), torch.zeros(())]
            group["step"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared: dict[str, Any] = self.state["all"]  # type: ignore[index]
        shared["sums"] = shared.get("sums", torch.zeros(3, dtype=torch.float64)) + 1.0
        for group in self.param_groups:
            group["k"] += 1
            group["is_warm"] = group["k"] > 2
            group["step"] += 3
            size = sum(float(each.grad.abs().sum()) for each in group["params"])
            group["history"][group["k"] % 2].fill_(size)
            slowness = float(sum(group["history"])) + float(group["step"]) + float(shared["sums"].mean())
            for parameter in group["params"]:
                self._update(parameter, group["lr"] / (1 + slowness / 100) * (1.0 if group["is_warm"] else 0.5))

    def _update(self, parameter: Tensor, rate: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"] = torch.zeros(())
            state["moments"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            state["inner"] = {"slow": parameter.clone(), "least": math.inf, "words": ("a", None, True)}
            state["half"] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        state["step"] += 1
        fast, slow = state["moments"]
        fast.mul_(0.9).add_(gradient)
        slow.mul_(0.5).add_(fast)
        inner = state["inner"]
        inner["least"] = min(inner["least"], float(gradient.abs().sum()))
        state["half"].mul_(0.5).add_(gradient.abs())
        pull = fast + 0.5 * slow + 0.1 * (parameter - inner["slow"])
        parameter.sub_(rate * pull / (state["step"].sqrt() + inner["least"]))
        parameter.mul_(1 - 1e-3 * state["half"].to(gradient.abs().dtype).clamp(max=1))
        inner["slow"].lerp_(parameter, 0.1)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tm.optim.sgd(lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda: tm.optim.adamw(lr=0.01, weight_decay=0.1, groups={"head.*": {"lr_scale": 0.5}}),
    "adamw-plain": lambda: tm.optim.by_reference(torch.optim.AdamW, lr=0.01, amsgrad=True, fused=False, foreach=False),
    "rmsprop": lambda: tm.optim.by_reference(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda: tm.optim.by_reference(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "adafactor": lambda: tm.optim.by_reference(torch.optim.Adafactor, lr=0.01),
    "nadam": lambda: tm.optim.by_reference(torch.optim.NAdam, lr=0.01),
    "nested": lambda: tm.optim.by_reference(Nested, lr=0.01),
}
_NO_COMPLEX = ("adafactor", "adamw", "sgd")
"""The first takes no complex parameters, and beside one the others would not be fused."""


@dataclass(frozen=True)
class Case:
    """A job, and how it is run. By default nine steps of three epochs, whose rows 8 divides."""

    optimizer: str = "adamw"
    precision: Precision = "fp32"
    samples: int = 24
    steps: int | None = 9
    epochs: float | None = None
    clip: float | None = None
    warmup: int = 0
    outlier: float = 0.0
    evaluate_every: str | None = None
    num_workers: int = 0
    micro_batch: int | None = None
    is_complex: bool | None = None

    def __str__(self) -> str:
        changed = {name: each for name, each in asdict(self).items() if each != getattr(Case, name)}
        return ",".join([self.optimizer, *(f"{name}={each}" for name, each in changed.items() if name != "optimizer")])

    @property
    def layout(self) -> str:
        cut = f" micro_batch={self.micro_batch}" if self.micro_batch else ""
        return f"precision={self.precision}{cut}"

    def options(self, save_every: str) -> tm.RunOptions:
        return tm.RunOptions(
            save_every=save_every, evaluate_every=self.evaluate_every, num_workers=self.num_workers, keep_last="all"
        )


def build_job(case: Case) -> tm.Job:
    """The job of a case, as a user writes it."""
    is_complex = case.optimizer not in _NO_COMPLEX if case.is_complex is None else case.is_complex
    return tm.Job(
        model=lambda: Zoo(is_complex=is_complex),
        data=Rows(case.samples, outlier=case.outlier),
        valid=Rows(5, seed=1) if case.evaluate_every else None,
        inputs=("x",),
        loss=tm.losses.mse(target="y"),
        optimizer=OPTIMIZERS[case.optimizer](),
        schedule=tm.optim.cosine(warmup=f"{case.warmup}steps"),
        global_batch=8,
        steps=None if case.epochs else case.steps,
        epochs=case.epochs,
        clip=case.clip,
        seed=3,
    )


class Left(Exception):
    """Ends a loop in the middle, so that nothing more is saved."""


Ids = list[tuple[int, int]]
"""(position in the run, sample id) of what a rank trained on."""


def train(
    job: tm.Job,
    layout: str = "",
    *,
    run: Path,
    options: tm.RunOptions,
    until: int | None = None,
    prepare: Callable[[Run], None] = lambda running: None,
    each_step: Callable[[Run], None] = lambda running: None,
    **begin: Any,
) -> Ids:
    """Trains to the end, or leaves the loop in the middle of the step after `until`: as a kill would, but for events.

    On as many ranks as the pool has; `prepare` is called before the first step of this start.
    """
    seen: Ids = []
    try:
        with joined_world(), tm.start(job, layout, run=run, options=options, **begin) as running:
            prepare(running)
            for batch in running:
                if until is not None and batch.index >= until:
                    raise Left
                for each in batch.micro_batches:
                    if not each.weightless and "id" in each.tensors:
                        seen += enumerate(each.tensors["id"].tolist(), each.position)
                running.step(batch)
                each_step(running)
    except Left:
        pass
    return seen


@contextmanager
def joined_world() -> Iterator[None]:
    """Inside, `tm.start` runs on the ranks that the pool has joined, in place of those a launcher would have started.

    It leaves the pool's groups as they are.
    """
    if not dist.is_initialized():
        yield
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    environment = WorkerEnvironment(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        node_rank=0,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=1,
        launcher="torchrun",
    )
    before = assemble.discover, assemble.open_world, assemble.close_world
    assemble.discover = lambda: environment
    assemble.open_world = lambda environment, layout, *, device: join_default_group(layout, torch.device("cpu"))
    assemble.close_world = lambda: None
    try:
        yield
    finally:
        assemble.discover, assemble.open_world, assemble.close_world = before


@dataclass(frozen=True)
class Contents:
    """A run's newest checkpoint as a reader finds it."""

    step: int
    tensors: dict[str, Tensor]
    state: StateRecord


def read_newest(run: Path, step: int | None = None) -> Contents:
    """The newest checkpoint of a run, or that of `step`, every byte of it verified."""
    step = list_steps(run)[0] if step is None else step
    found = read_checkpoint(checkpoint_folder(run, step), Lineage(read_run(run / RUN_FILE).id, {}))
    verify_files(found.folder, found.manifest, list(found.manifest.files))
    with open_checkpoint(found.folder, found.manifest) as reader:
        return Contents(step, {name: reader.read(name) for name in found.manifest.tensors}, found.state)


def assert_same_run(run: Path, other: Path) -> None:
    """Both have the same records, weights, and optimizer state, to the bit."""
    assert (run / METRICS_FILE).read_text() == (other / METRICS_FILE).read_text()
    ours, theirs = read_newest(run), read_newest(other)
    assert ours.tensors.keys() == theirs.tensors.keys()
    different = [name for name, each in theirs.tensors.items() if not same_bits(ours.tensors[name], each)]
    assert not different
    plain = ("step", "position", "num_updates", "loss_scale", "optimizer", "model", "trained")
    assert all(getattr(ours.state, name) == getattr(theirs.state, name) for name in plain)
    assert (run / WEIGHTS_FILE).read_bytes() == (other / WEIGHTS_FILE).read_bytes()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in type, shape and bits; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
