"""How a job is spread: degrees, and the arithmetic of who gets which samples. No torch, no model."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from trimaran.errors import LayoutError

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full"]
Pipe = Literal["gpipe", "1f1b", "interleaved", "zbv"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is spread over processes. Parsed from, and printed as, "dp=2 tp=2 micro_batch=4 precision=bf16".

    dp, tp, pp: degrees of data, tensor and pipeline parallelism; dp None fills the world.
    zero: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters; shard: within groups of that
    many ranks (None: all of dp). micro_batch: samples of one forward on one rank (None: the local batch in one piece).
    Raises LayoutError for a value outside its range or an axis that is not built yet.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    zero: int = 0
    shard: int | None = None
    micro_batch: int | None = None
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    pipe: Pipe = "1f1b"
    vpp: int = 1
    sp: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "shard", "micro_batch", "vpp"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise LayoutError(f"{name}={value!r}.", f"{name} is a count.", "Give a whole number from 1.")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"zero={self.zero!r}.", "The ZeRO stages are 0, 1, 2 and 3.", "Give one of them.")
        for name, kind in (("precision", Precision), ("recompute", Recompute), ("pipe", Pipe)):
            if getattr(self, name) not in get_args(kind):
                raise LayoutError(
                    f"{name}={getattr(self, name)!r} is unknown.",
                    f"Known: {', '.join(get_args(kind))}.",
                    _nearest(str(getattr(self, name)), get_args(kind)),
                )
        if self.shard is not None and self.zero == 0:
            raise LayoutError(
                f"shard={self.shard} with zero=0.",
                "shard is the number of ranks that share what zero cuts.",
                "Give zero=1, 2 or 3, or leave shard out.",
            )
        if self.sp and self.tp == 1:
            raise LayoutError(
                "sp=true with tp=1.",
                "sp cuts the activations between the blocks over the tensor ranks, and there is one.",
                "Give tp=2 or more, or leave sp out.",
            )
        self._refuse_what_is_not_built()

    def _refuse_what_is_not_built(self) -> None:
        for item in fields(self):
            if item.name not in _BUILT and getattr(self, item.name) != item.default:
                raise LayoutError(
                    f"{item.name}={getattr(self, item.name)} is not built yet.",
                    f"This version spreads a job by: {', '.join(_BUILT)}.",
                    f"Leave {item.name} out.",
                )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from "dp=2 precision=bf16" (blanks or commas between). Raises LayoutError naming the bad word."""
        values: dict[str, Any] = {}
        kinds = {item.name: str(item.type) for item in fields(cls)}
        for word in text.replace(",", " ").split():
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise LayoutError(f"{word!r} is not of the form axis=value.", _KNOWN, 'Write, for example, "dp=2".')
            if name not in kinds:
                raise LayoutError(f"{name!r} is no axis of a layout.", _KNOWN, _nearest(name, kinds))
            if name in values:
                raise LayoutError(f"{name} is given twice.", "An axis has one value.", f"Drop one {name}=.")
            values[name] = _parse_value(name, value, kinds[name])
        return cls(**values)

    def __str__(self) -> str:
        """Only what differs from the defaults, in the order of the fields; parses back to an equal layout."""
        words = [
            f"{item.name}={str(value).lower() if isinstance(value, bool) else value}"
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default
        ]
        return " ".join(words)

    def resolve(self, *, world_size: int, global_batch: int) -> ResolvedLayout:
        """This layout with dp and micro_batch filled in. Raises LayoutError where it does not fit the world."""
        model_ranks = self.tp * self.pp
        dp = self.dp if self.dp is not None else max(1, world_size // model_ranks)
        if dp * model_ranks != world_size:
            raise LayoutError(
                f"dp={dp} × tp={self.tp} × pp={self.pp} is {dp * model_ranks} ranks, and there are {world_size}.",
                "Every process is one rank of the layout.",
                f"Start {dp * model_ranks} processes (--procs {dp * model_ranks})"
                + (", or leave dp out: it fills the world." if world_size % model_ranks == 0 else "."),
            )
        shard = self._resolve_shard(dp)
        largest_share = math.ceil(global_batch / dp)
        micro_batch = self.micro_batch if self.micro_batch is not None else largest_share
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return ResolvedLayout(**values | {"dp": dp, "shard": shard, "micro_batch": min(micro_batch, largest_share)})

    def _resolve_shard(self, dp: int) -> int | None:
        if self.zero == 0:
            return None
        if dp == 1:
            raise LayoutError(
                f"zero={self.zero} with dp=1.",
                "zero cuts the state over the data ranks, and there is one.",
                "Leave zero out, or start more processes (--procs).",
            )
        shard = dp if self.shard is None else self.shard
        if shard == 1 or dp % shard:
            fitting = [str(each) for each in range(2, dp + 1) if dp % each == 0]
            raise LayoutError(
                f"shard={shard} with dp={dp}.",
                "Data ranks shard in groups of equal size, of two ranks at least.",
                f"Give one of {', '.join(fitting)}, or leave shard out: all of dp.",
            )
        return shard


@dataclass(frozen=True, kw_only=True)
class ResolvedLayout(Layout):
    """A layout that fits its world: nothing in it is left out; `shard` is None where nothing is sharded."""

    dp: int
    micro_batch: int


_BUILT = ("dp", "tp", "sp", "zero", "shard", "micro_batch", "precision", "recompute", "compile")
_KNOWN = f"A layout's axes are: {', '.join(item.name for item in fields(Layout))}."


@dataclass(frozen=True)
class Slice:
    """A micro-batch as positions [start, stop) of the run; `weightless` repeats one that counts for nothing."""

    start: int
    stop: int
    weightless: bool = False


def deal(*, start: int, stop: int, dp: int, dp_rank: int, micro_batch: int) -> tuple[Slice, ...]:
    """The micro-batches of one data rank for the global batch at positions [start, stop).

    Ranks take slices in order, their sizes differing by at most one. Every rank gets the same number of
    micro-batches, so that all run in lockstep: what is missing is a weightless repeat of the batch's first sample.
    """
    share, extra = divmod(stop - start, dp)
    first = start + dp_rank * share + min(dp_rank, extra)
    last = first + share + (dp_rank < extra)
    num_micro_batches = math.ceil((share + (extra > 0)) / micro_batch)
    real = [Slice(at, min(at + micro_batch, last)) for at in range(first, last, micro_batch)]
    filler = Slice(start, start + 1, weightless=True)
    return (*real, *[filler] * (num_micro_batches - len(real)))


def _parse_value(name: str, text: str, kind: str) -> Any:
    if kind == "bool":
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise LayoutError(f"{name}={text!r}.", f"{name} is a switch.", "Write true or false.")
    if kind.startswith("int"):
        try:
            return int(text)
        except ValueError:
            raise LayoutError(f"{name}={text!r}.", f"{name} is a count.", "Give a whole number.") from None
    return text


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else "Use one of those."
