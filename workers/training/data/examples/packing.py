"""Which documents share a sequence: best fit, longest first, within groups of shuffled samples.

A pure function of lengths and seed. Does not depend on tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GROUP = 4096  # samples packed together: large enough for full rows, small enough to stay random

Order = NDArray[np.int64]


def shuffled(count: int, seed: Sequence[int] | None) -> Order:
    """A seeded permutation of `count` samples; their own order for None."""
    if seed is None:
        return np.arange(count, dtype=np.int64)
    return np.random.default_rng(list(seed)).permutation(count)


def pack(lengths: NDArray[np.int64], capacity: int, *, order: Order) -> list[list[int]]:
    """Rows of samples whose lengths sum to at most `capacity`, each sample once.

    Groups of GROUP samples in `order` are packed by best fit decreasing, which needs at most 11/9
    of the fewest rows (Johnson 1974). Raises ValueError for a length above `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a length of {int(lengths.max())} is above the capacity {capacity}")
    rows: list[list[int]] = []
    for first in range(0, len(order), GROUP):
        group = order[first : first + GROUP]
        # stable: equal lengths stay in the given order
        by_length = group[np.argsort(-lengths[group], kind="stable")]
        rows += _best_fit(by_length.tolist(), lengths[by_length].tolist(), capacity)
    return rows


def _best_fit(samples: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # space left and row, sorted
    for sample, length in zip(samples, lengths, strict=True):
        place = bisect_left(free, (length, -1))
        if place == len(free):
            rows.append([sample])
            left, row = capacity - length, len(rows) - 1
        else:
            space, row = free.pop(place)
            rows[row].append(sample)
            left = space - length
        if left > 0:
            insort(free, (left, row))
    return rows
