"""A job file that trains in milliseconds and can be told to go wrong, and ways to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JOB = '''
import os, signal, sys, time

import torch
from torch import nn

import trimaran as tm


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Mlp(nn.Module):
    def __init__(self, width, fault, fault_rank, sleep):
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 1)
        self.what, _, self.step = fault.partition("@")
        self.mine = int(os.environ.get("RANK", 0)) == fault_rank
        self.sleep = sleep
        self.calls = -1  # the dry micro-batch makes it 0, step k makes it k

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls > 0:
            time.sleep(self.sleep)
        if self.training and self.mine and self.what and self.calls == int(self.step):
            go_wrong(self.what)
        return self.down(self.up(x).tanh())


def go_wrong(what):
    with open("went_wrong", "w") as mark:
        mark.write(str(time.time()))
    target = os.getppid() if "RANK" in os.environ else os.getpid()
    if what == "raise":
        raise RuntimeError("the forward broke")
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        sys.exit(3)
    elif what == "interrupt":
        os.kill(target, signal.SIGINT)
    elif what == "terminate":
        os.kill(target, signal.SIGTERM)
    elif what == "interrupt twice":
        os.kill(target, signal.SIGINT)
        time.sleep(0.5)
        os.kill(target, signal.SIGINT)
        time.sleep(60)


def job(
    width: int = 8, samples: int = 20, valid: int = 7, lr: float = 1e-2, fault: str = "", fault_rank: int = 0,
    sleep: float = 0.0, epochs: float = 0.0, length: int = 6,
):
    """A tiny regression."""
    return tm.Job(
        model=lambda: Mlp(width, fault, fault_rank, sleep),
        data=Rows(samples),
        valid=Rows(valid, seed=1) if valid else None,
        inputs=("x",),
        loss=tm.losses.mse(target="y"),
        metrics={"error": tm.losses.custom(
            total=lambda output, batch: (output - batch["y"]).abs().sum(), weight=lambda batch: len(batch["y"])
        )},
        optimizer=tm.optim.adamw(lr=lr),
        global_batch=8,
        steps=None if epochs else length,
        epochs=epochs or None,
    )
'''

SOURCE = Path(__file__).parents[1] / "src"


def write_job(folder: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """The job file in `folder`, with texts replaced and `more` appended; each replaced text must be there."""
    text = JOB
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "tiny.py"
    path.write_text(text + more)
    return path


def start_command(*words: str | Path, cwd: Path, **environ: str) -> subprocess.Popen[str]:
    """`trimaran` with these words as a process of its own, its output piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "trimaran", *map(str, words)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_command(process: subprocess.Popen[str], timeout: float = 120.0) -> tuple[int, str, str]:
    """Exit code, output and errors, within so many seconds."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def run_command(*words: str | Path, cwd: Path, timeout: float = 120.0) -> tuple[int, str, str]:
    """Exit code, output and errors of `trimaran` with these words."""
    return finish_command(start_command(*words, cwd=cwd), timeout)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(run: Path) -> list[tuple[str, int]]:
    """(event, step) of a run's events, in order."""
    return [(each["event"], each["step"]) for each in lines_of(run / "events.jsonl")]


def losses_of(run: Path) -> Sequence[float]:
    """The loss of each step of a run."""
    return [each["loss"] for each in lines_of(run / "metrics.jsonl")]
