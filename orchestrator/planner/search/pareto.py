"""Running selections over a stream of rows: the best by rank, and the Pareto front.

Does not depend on plans or terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass
class TopRows:
    """The first `most` rows by their keys in lexicographic order; ties go to the lower id."""

    most: int
    keys: list[Floats] = field(default_factory=list)
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def bound(self) -> float:
        """Rows with a first key above this cannot be among the best."""
        return float(self.keys[0][-1]) if self.ids.size >= self.most else np.inf

    def add(self, keys: list[Floats], ids: Ids) -> None:
        """Adds rows: keys and ids `(n,)` each."""
        bound = self.bound
        if ids.size > 4 * self.most:
            # the first key alone excludes most rows; rows equal to the bound stay
            bound = min(bound, float(np.partition(keys[0], self.most - 1)[self.most - 1]))
        near = keys[0] <= bound
        if not near.any():
            return
        current = self.keys or [np.empty(0) for _ in keys]
        joined = [np.concatenate([old, new[near]]) for old, new in zip(current, keys, strict=True)]
        all_ids = np.concatenate([self.ids, ids[near]])
        order = np.lexsort((all_ids, *reversed(joined)))[: self.most]
        self.keys, self.ids = [column[order] for column in joined], all_ids[order]


@dataclass
class Front:
    """The Pareto front over two numbers, smaller is better.

    Of equal rows the first one stays. `first` ascends, `second` descends.
    """

    first: Floats = field(default_factory=lambda: np.empty(0))
    second: Floats = field(default_factory=lambda: np.empty(0))
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, first: Floats, second: Floats, ids: Ids) -> None:
        """Adds rows: both numbers and ids `(n,)` each."""
        if self.ids.size:
            index = np.searchsorted(self.first, first, side="right") - 1
            better = (index < 0) | (second < self.second[np.maximum(index, 0)])
            if not better.any():
                return
            first, second, ids = first[better], second[better], ids[better]
        first, second = np.concatenate([self.first, first]), np.concatenate([self.second, second])
        ids = np.concatenate([self.ids, ids])
        order = np.lexsort((ids, second, first))
        first, second, ids = first[order], second[order], ids[order]
        lowest = np.minimum.accumulate(second)
        front = (
            np.concatenate([[True], second[1:] < lowest[:-1]]) if second.size else np.empty(0, bool)
        )
        self.first, self.second, self.ids = first[front], second[front], ids[front]


def undominated(columns: list[Any]) -> Ids:
    """Indices of the rows on the Pareto front over all columns; smaller is better.

    `columns` are `(n,)` each; compares rows in pairs, so use it for a few thousand at most.
    """
    table = np.stack([np.asarray(column, float) for column in columns], axis=1)
    front = []
    for index, row in enumerate(table):
        no_worse = (table <= row).all(axis=1)
        if not (no_worse & (table < row).any(axis=1)).any():
            front.append(index)
    return np.array(front, np.int64)


def thinned(values: Floats, most: int) -> Ids:
    """At most `most` indices of ascending `values`, including both ends, evenly spaced in log."""
    if values.size <= most:
        return np.arange(values.size)
    logs = np.log(np.maximum(values, np.finfo(float).tiny))
    targets = np.linspace(logs[0], logs[-1], most)
    return np.unique(np.clip(np.searchsorted(logs, targets), 0, values.size - 1))
