"""Drills: faults made on purpose at a named moment of a run, so that what follows can be rehearsed and tested."""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimaran.errors import DrillError, RunError, UsageError
from trimaran.phases import COMMIT_POINTS, PHASES, WRITE_POINTS, Moment, Phase, WritePoint

Kind = Literal["kill", "stop", "raise", "nan", "slow", "disk-full", "corrupt"]
KINDS: tuple[Kind, ...] = get_args(Kind)

DRILLS_FOLDER = "drills"
"""The folder of a run directory that holds the marks of drills that have fired."""

_POINTS: tuple[Phase | WritePoint, ...] = (*PHASES, *WRITE_POINTS)
_POINTS_OF: Mapping[Kind, tuple[Phase | WritePoint, ...]] = {
    "nan": ("backward",),
    "disk-full": WRITE_POINTS,
    "corrupt": ("save:after-rename",),
}
_DEFAULT_POINT: Mapping[Kind, Phase | WritePoint] = {
    "nan": "backward",
    "disk-full": "save:mid-shard",
    "corrupt": "save:after-rename",
}
_DEFAULT_SECONDS = 5.0
_MOST_SECONDS = 86400.0
_EXAMPLE = 'Write, for example, "kill rank=1 step=7 phase=save:before-manifest".'


@dataclass(frozen=True)
class Drill:
    """One fault: what happens, on which rank (None: on each), in which step (from 1), when the rank reaches `phase`.

    `seconds` is how long `slow` sleeps.
    """

    kind: Kind
    rank: int | None
    step: int
    phase: Phase | WritePoint
    seconds: float = _DEFAULT_SECONDS

    def __str__(self) -> str:
        """All its words; they parse back to an equal drill."""
        rank = "all" if self.rank is None else self.rank
        length = f" seconds={self.seconds:g}" if self.kind == "slow" else ""
        return f"{self.kind} rank={rank} step={self.step} phase={self.phase}{length}"

    def ranks(self, world_size: int) -> Sequence[int]:
        """The ranks it strikes; of a moment that rank 0 alone reaches, that one."""
        if self.rank is not None:
            return (self.rank,)
        return (0,) if self.phase in COMMIT_POINTS else range(world_size)

    def mark(self, rank: int) -> str:
        """The name of the file that says it has fired on `rank`."""
        length = f"-{self.seconds:g}s" if self.kind == "slow" else ""
        return f"{self.kind}-step{self.step}-{self.phase.replace(':', '-')}{length}-rank{rank}"


class Drills:
    """An observer of a run's phases that fires each drill of this rank once, at its moment; any thread may call it.

    Before one fires, it makes its mark, a file in `marks`, and one that is marked does not fire again: a run that is
    started anew goes on where the fault ended it. Without `marks` it fires once in this process.
    """

    def __init__(self, drills: Sequence[Drill], *, rank: int, world_size: int, marks: Path | None) -> None:
        self._drills = tuple(drills)
        self._own = tuple(drill for drill in drills if rank in drill.ranks(world_size))
        self._rank = rank
        self._world_size = world_size
        self._marks = marks
        self._lock = threading.Lock()
        self._taken: set[Drill] = set()
        self._is_attached = False
        self._spoils_gradients = False

    def __call__(self, moment: Moment) -> None:
        """Raises what a drill raises: DrillError, OSError; RunError where a mark cannot be made."""
        if moment.point == "synchronize":
            self._spoils_gradients = False  # the backwards of its step are over
        for drill in self._own:
            if drill.step == moment.step and drill.phase == moment.point and self._take(drill):
                self._fire(drill, moment.path)

    def attach(self, model: nn.Module) -> None:
        """Lets `nan` reach the gradients of `model`. To be called once, before the first step."""
        self._is_attached = True
        if any(drill.kind == "nan" for drill in self._own):
            # Of all that train, since nobody knows yet which of them a step uses; where parameters are sharded, their
            # own gradients pass no hook.
            for module in model.modules():
                if any(each.requires_grad for each in module.parameters(recurse=False)):
                    module.register_forward_hook(self._watch)

    def describe_unfired(self) -> list[str]:
        """A line for each drill that has not fired on all of its ranks, as the marks tell: a run says so at its end."""
        return [
            f"drill    {drill} did not fire on rank {', '.join(map(str, left))}: the run never got there"
            for drill in self._drills
            if (left := [rank for rank in drill.ranks(self._world_size) if not self._has_fired(drill, rank)])
        ]

    def _has_fired(self, drill: Drill, rank: int) -> bool:
        if self._marks is not None:
            return (self._marks / drill.mark(rank)).exists()
        return rank != self._rank or drill in self._taken

    def _take(self, drill: Drill) -> bool:
        """Whether the drill is this caller's to fire."""
        with self._lock:
            if drill in self._taken:
                return False
            self._taken.add(drill)
            return self._marks is None or _make_mark(self._marks / drill.mark(self._rank), drill)

    def _fire(self, drill: Drill, path: Path | None) -> None:
        _say(f"{drill} fires on rank {self._rank} (pid {os.getpid()})")
        match drill.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # To this thread, which then takes not one step more; the process stops with it.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "raise":
                raise DrillError(
                    f'the drill "{drill}" raised this.',
                    "A drill is a fault made on purpose.",
                    "Give the same command again: the drill has fired, and the run goes on.",
                )
            case "nan":
                assert self._is_attached, "attach(model) comes before the first step"
                self._spoils_gradients = True
            case "slow":
                time.sleep(drill.seconds)
            case "disk-full":
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (a drill)", str(path))
            case "corrupt":
                assert path is not None
                _flip_byte(path)

    def _watch(self, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor | None:
        return gradient * float("nan") if self._spoils_gradients else None


def build_drills(texts: Sequence[str], *, rank: int, world_size: int, marks: Path | None) -> Drills | None:
    """The drills that are written so, as an observer for this rank; None where there are none.

    `marks` is the folder in which those that have fired are marked; it is made when the first does. Every rank may
    call it by itself. Raises UsageError for a text that says no drill, the same on every rank.
    """
    drills = [parse_drill(text) for text in texts]
    seen: set[str] = set()
    for text, drill in zip(texts, drills, strict=True):
        if drill.rank is not None and drill.rank >= world_size:
            raise UsageError(
                f'drill "{text}": there is no rank {drill.rank}.',
                f"Ranks count from 0, and this run has {world_size}.",
                "Give one of them, or rank=all.",
            )
        marked = {drill.mark(each) for each in drill.ranks(world_size)}
        if marked & seen:
            raise UsageError(f'drill "{text}" is given twice.', "A drill fires once in a run.", "Drop one of them.")
        seen |= marked
    return Drills(drills, rank=rank, world_size=world_size, marks=marks) if drills else None


def parse_drill(text: str) -> Drill:
    """A drill from "KIND rank=K step=N phase=POINT". Raises UsageError naming the word that is wrong.

    `rank` is a number or "all", 0 where it is left out; `step` counts from 1; `phase` is a phase of a step or a write
    point of a save; `slow` takes `seconds`.
    """
    kind, values = _split(text)
    phase = _read_phase(text, kind, values.get("phase"))
    rank = None if values.get("rank") == "all" else _read_count(text, "rank", values.get("rank", "0"), least=0)
    if phase in COMMIT_POINTS and rank:
        raise UsageError(
            f'drill "{text}": rank {rank} never reaches {phase}.',
            "Rank 0 alone commits a checkpoint.",
            "Give rank=0, or an earlier point.",
        )
    if "step" not in values:
        raise UsageError(f'drill "{text}" has no step=.', "A drill fires in one step of the run.", _EXAMPLE)
    step = _read_count(text, "step", values["step"], least=1)
    return Drill(kind, rank, step, phase, _read_seconds(text, values.get("seconds")))


def _split(text: str) -> tuple[Kind, dict[str, str]]:
    """Its kind, and its other words by key."""
    first, *words = text.split() or [""]
    kind = next((kind for kind in KINDS if kind == first), None)
    if kind is None:
        raise _unknown(text, first, "kind of drill", KINDS)
    keys = ("rank", "step", "phase", *(("seconds",) if kind == "slow" else ()))
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f'drill "{text}": "{word}" is not of the form key=value.', _known(keys), _EXAMPLE)
        if key not in keys:
            raise _unknown(text, key, f"key of {kind}", keys)
        if key in values:
            raise UsageError(f'drill "{text}" gives {key} twice.', "A key has one value.", f"Drop one {key}=.")
        values[key] = value
    return kind, values


def _read_phase(text: str, kind: Kind, value: str | None) -> Phase | WritePoint:
    if value is None:
        return _DEFAULT_POINT.get(kind, "forward")
    phase = next((point for point in _POINTS if point == value), None)
    if phase is None:
        raise _unknown(text, value, "phase", _POINTS)
    legal = _POINTS_OF.get(kind, _POINTS)
    if phase not in legal:
        raise UsageError(
            f'drill "{text}": there is no {kind} in phase={phase}.',
            f"It can happen at: {', '.join(legal)}.",
            f"Leave phase out, which is {_DEFAULT_POINT[kind]}" + (", or give one of these." if legal[1:] else "."),
        )
    return phase


def _read_count(text: str, key: str, value: str, *, least: int) -> int:
    if value.isascii() and value.isdecimal() and int(value) >= least:
        return int(value)
    more = ', or "all"' if key == "rank" else ""
    raise UsageError(
        f'drill "{text}" has {key}={value}.', f"It is a whole number that counts from {least}{more}.", _EXAMPLE
    )


def _read_seconds(text: str, value: str | None) -> float:
    if value is None:
        return _DEFAULT_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(
            f'drill "{text}" has seconds={value}.',
            "It is a number above 0, and at most a day.",
            'Write, for example, "slow step=7 seconds=2.5".',
        )
    return seconds


def _unknown(text: str, word: str, what: str, known: Collection[str]) -> UsageError:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f'Did you mean "{close[0]}"? ' if close else ""
    return UsageError(f'drill "{text}": "{word}" is no {what}.', _known(known), guess + _EXAMPLE)


def _known(words: Collection[str]) -> str:
    return f"Known: {', '.join(words)}."


def _make_mark(path: Path, drill: Drill) -> bool:
    """Whether the mark was not there and is now, on disk."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(f"{drill}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise RunError(
            f'the drill "{drill}" cannot be marked at {path}: {problem.strerror or problem}.',
            "A drill is marked before it fires, so that it fires once.",
            "Make that folder writable, or leave the drill out.",
        ) from problem
    return True


def _flip_byte(checkpoint: Path) -> None:
    """Inverts the byte in the middle of the largest shard."""
    shard = max(checkpoint.glob("*.safetensors"), key=lambda file: (file.stat().st_size, file.name))
    middle = shard.stat().st_size // 2
    with shard.open("r+b") as file:
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())
    _say(f"byte {middle} of {shard} is inverted")


def _say(text: str) -> None:
    """On every rank, and not through the console of rank 0, which may be the one that is killed next."""
    print(f"drill    {text}", file=sys.stderr, flush=True)
