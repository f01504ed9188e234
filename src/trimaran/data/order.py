"""The one global sample order: which sample stands at which position of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimaran.errors import DataError
from trimaran.world.mix import Words, derive, mix

Int64s = NDArray[np.int64]

_ROUNDS = 6
# On fewer bits six rounds mix five to eight samples visibly worse.
_MIN_BITS = 4


@dataclass(frozen=True)
class Order:
    """Maps positions of the run to samples, as a function of (seed, position) and of nothing else.

    Each epoch is another permutation of all samples, computed in constant memory. `shuffle=False` goes through
    the samples as they stand, for evaluation. Raises DataError where there is no sample.
    """

    num_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                "The data has no samples.",
                "A run needs at least one.",
                "Check the path, the split and any filter that made this source.",
            )

    def at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """(epochs, sample ids) of the samples at `positions` (int64 [num_positions], from 0)."""
        epochs, indices = np.divmod(positions, self.num_samples)
        if self.shuffle:
            indices = _permute(indices, epochs, num_samples=self.num_samples, seed=self.seed)
        return epochs, indices


def _permute(indices: Int64s, epochs: Int64s, *, num_samples: int, seed: int) -> Int64s:
    """Images of `indices` under the bijection of [0, num_samples) keyed by (seed, epoch).

    A Feistel network permutes the next power of two; an image outside the range is permuted again until it falls
    inside ("cycle walking", Black and Rogaway 2002), which takes less than two rounds through it on average.
    """
    num_bits = max(_MIN_BITS, (num_samples - 1).bit_length())
    key = derive(seed, epochs)
    keys = [mix(key ^ np.uint64(number)) for number in range(_ROUNDS)]
    images = _feistel(indices.astype(np.uint64), keys, num_bits)
    while (outside := images >= np.uint64(num_samples)).any():
        images[outside] = _feistel(images[outside], [key[outside] for key in keys], num_bits)
    return images.astype(np.int64)


def _feistel(words: Words, keys: list[Words], num_bits: int) -> Words:
    """A bijection of [0, 2^num_bits): each round exchanges two parts and hides one of them behind the other."""
    left_bits, right_bits = num_bits // 2, num_bits - num_bits // 2
    left, right = words >> np.uint64(right_bits), words & _ones(right_bits)
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & _ones(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _ones(num_bits: int) -> np.uint64:
    return np.uint64((1 << num_bits) - 1)
