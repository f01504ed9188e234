"""What a job says of a model's layers, so that tensor parallelism can cut them. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trimaran.errors import JobError


@dataclass(frozen=True)
class Colwise:
    """See `colwise`. `gathers` is for a layer whose output is wanted whole on every rank."""

    heads: int | None = None
    kv_heads: int | None = None
    parts: int = 1
    gathers: bool = False


@dataclass(frozen=True)
class Rowwise:
    """See `rowwise`."""


@dataclass(frozen=True)
class Vocab:
    """See `vocab`."""


@dataclass(frozen=True)
class Sequence:
    """See `sequence`."""


@dataclass(frozen=True)
class Replicated:
    """A module that every rank holds whole, as it does what no pattern names."""


Declaration = Colwise | Rowwise | Vocab | Sequence | Replicated


def colwise(*, heads: int | None = None, kv_heads: int | None = None, parts: int = 1) -> Colwise:
    """A linear layer whose outputs are dealt to the tensor ranks; a `rowwise` one takes them in.

    heads: attention heads in its outputs; each rank gets whole ones. kv_heads: with grouped queries, the heads of keys
    and values. parts: how many projections the layer fuses, one behind the other, such as 3 for queries, keys and
    values; each of them is dealt by itself. With `kv_heads` the three differ in size. Raises JobError for counts that
    cannot be.
    """
    for name, count in (("heads", heads), ("kv_heads", kv_heads), ("parts", parts)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise JobError(f"colwise({name}={count!r}).", f"{name} is a count.", "Give a whole number from 1.")
    if kv_heads is not None and (heads is None or heads % kv_heads):
        raise JobError(
            f"colwise(heads={heads}, kv_heads={kv_heads}).",
            "Each key-value head serves as many query heads as the others.",
            "Give heads= too, a multiple of kv_heads.",
        )
    if kv_heads not in (None, heads) and parts not in (1, 3):
        raise JobError(
            f"colwise(heads={heads}, kv_heads={kv_heads}, parts={parts}).",
            "A fused projection with fewer key-value heads is made of queries, keys and values.",
            "Give parts=3; or parts=1 for a layer that gives the queries, keys or values alone.",
        )
    return Colwise(heads, kv_heads, parts)


def rowwise() -> Rowwise:
    """A linear layer that takes in what a `colwise` one before it has dealt; its outputs are summed over the ranks."""
    return Rowwise()


def vocab() -> Vocab:
    """An embedding, or the linear layer that gives the logits, cut along the vocabulary.

    The loss is computed on the cut logits; whole ones are never made in training.
    """
    return Vocab()


def sequence() -> Sequence:
    """A layer between the blocks, such as a norm, that with `sp=true` works on a rank's own part of each sequence."""
    return Sequence()


_WORDS: dict[str, Declaration] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "vocab": Vocab(),
    "sequence": Sequence(),
    "replicated": Replicated(),
    # Hugging Face's
    "colwise_gather_output": Colwise(gathers=True),
    "colwise_rep": Colwise(gathers=True),
    "embedding_rowwise": Vocab(),
    "sequence_parallel": Sequence(),
    "replicated_with_grad_allreduce": Replicated(),
}


def read_declaration(pattern: str, value: object) -> Declaration:
    """What an entry of `Job.tp_plan` means. Raises JobError for a word that is not known."""
    if isinstance(value, Declaration):
        return value
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    close = difflib.get_close_matches(str(value), _WORDS, n=1, cutoff=0.5)
    raise JobError(
        f"tp_plan[{pattern!r}] is {value!r}.",
        f"A layer is one of: {', '.join(_WORDS)}; or tm.colwise(heads=..., parts=...).",
        f"Did you mean {close[0]!r}?" if close else "Use one of those, or leave the layer out: it is then replicated.",
    )


def matches(name: str, pattern: str, *, at_the_end: bool = False) -> bool:
    """Whether a dotted name fits a glob, part by part; `at_the_end`: its last parts do."""
    parts, patterns = name.split("."), pattern.split(".")
    if at_the_end:
        parts = parts[-len(patterns) :]
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


@dataclass(frozen=True)
class DealtRows:
    """The order in which a fused projection's rows lie on `num_ranks` ranks.

    Of each of its parts, `sizes` rows long, every rank has an equal slice; what a rank has lies in one piece. The
    *dealt* order is that of the ranks one behind the other, the *true* one that of the model.
    """

    sizes: tuple[int, ...]
    num_ranks: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Where the dealt rows [start, stop) come from: (first row counted from `start`, first true row, number)."""
        at = 0
        for rank in range(self.num_ranks):
            begin = 0
            for size in self.sizes:
                length = size // self.num_ranks
                low, high = max(at, start), min(at + length, stop)
                if low < high:
                    yield low - start, begin + rank * length + low - at, high - low
                at += length
                begin += size
