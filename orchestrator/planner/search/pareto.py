"""The best of a stream of plans, kept while they are computed: the first few by rank, and the
Pareto front.

Knows numbers and their order only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass
class Best:
    """The `most` rows that come first by their keys (the first key leads), ties to the lower id."""

    most: int
    keys: list[Floats] = field(default_factory=list)
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def bound(self) -> float:
        """A row whose first key is above this cannot come in."""
        return float(self.keys[0][-1]) if self.ids.size >= self.most else np.inf

    def add(self, keys: list[Floats], ids: Ids) -> None:
        """`(n,)` each."""
        bound = self.bound
        if (
            ids.size > 4 * self.most
        ):  # the first key alone rules most rows out; equal ones stay for the others to decide
            bound = min(bound, float(np.partition(keys[0], self.most - 1)[self.most - 1]))
        near = keys[0] <= bound
        if not near.any():
            return
        held = self.keys or [np.empty(0) for _ in keys]
        joined = [np.concatenate([old, new[near]]) for old, new in zip(held, keys, strict=True)]
        all_ids = np.concatenate([self.ids, ids[near]])
        order = np.lexsort((all_ids, *reversed(joined)))[: self.most]
        self.keys, self.ids = [each[order] for each in joined], all_ids[order]


@dataclass
class Front:
    """Rows for which no other is at least as good in both of two numbers and better in one; smaller
    is better.

    Of equal rows the first stays. `first` ascends, `second` descends.
    """

    first: Floats = field(default_factory=lambda: np.empty(0))
    second: Floats = field(default_factory=lambda: np.empty(0))
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, first: Floats, second: Floats, ids: Ids) -> None:
        """`(n,)` each."""
        if self.ids.size:
            at = np.searchsorted(self.first, first, side="right") - 1
            open_ = (at < 0) | (second < self.second[np.maximum(at, 0)])
            if not open_.any():
                return
            first, second, ids = first[open_], second[open_], ids[open_]
        first, second = np.concatenate([self.first, first]), np.concatenate([self.second, second])
        ids = np.concatenate([self.ids, ids])
        order = np.lexsort((ids, second, first))
        first, second, ids = first[order], second[order], ids[order]
        lowest = np.minimum.accumulate(second)
        kept = (
            np.concatenate([[True], second[1:] < lowest[:-1]]) if second.size else np.empty(0, bool)
        )
        self.first, self.second, self.ids = first[kept], second[kept], ids[kept]


def undominated(columns: list[Any]) -> Ids:
    """Indices of rows for which no other is at least as good everywhere and better somewhere;
    smaller is better.

    `columns` are `(n,)` each; rows are compared in pairs, for some thousands at most.
    """
    table = np.stack([np.asarray(each, float) for each in columns], axis=1)
    kept = []
    for at, row in enumerate(table):
        no_worse = (table <= row).all(axis=1)
        if not (no_worse & (table < row).any(axis=1)).any():
            kept.append(at)
    return np.array(kept, np.int64)


def thinned(values: Floats, most: int) -> Ids:
    """At most `most` of the indices of ascending `values`, both ends among them, spread evenly over
    their logarithm.
    """
    if values.size <= most:
        return np.arange(values.size)
    place = np.log(np.maximum(values, np.finfo(float).tiny))
    wanted = np.linspace(place[0], place[-1], most)
    return np.unique(np.clip(np.searchsorted(place, wanted), 0, values.size - 1))
