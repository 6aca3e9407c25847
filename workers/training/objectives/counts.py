"""The number that a step's summed losses are divided by: known from the data, on every rank.

Does not communicate: every rank reads the counts of all rows of a step.
"""

from __future__ import annotations

from functools import lru_cache

from workers.training.data.rows import RowSource
from workers.training.objectives.objective import Objective


class Counts:
    """The objective's counts of rows by global sample index."""

    def __init__(self, objective: Objective, samples: RowSource) -> None:
        self.objective, self.samples = objective, samples
        # a step's counts are read again for its report; later epochs have the same rows
        self._count = lru_cache(maxsize=1 << 16)(self._read)

    def of_sample(self, index: int) -> float:
        """The count of global sample `index`."""
        if self.objective.sums_tokens and self.samples.uniform:
            return float(self.samples.seq_len)
        return self._count(index)

    def of_samples(self, first: int, count: int) -> float:
        """The count of `count` samples from `first` on: never 0, so that losses can be divided."""
        if self.objective.sums_tokens and self.samples.uniform:
            return float(count * self.samples.seq_len)
        return sum(self._count(first + index) for index in range(count)) or 1.0

    def _read(self, index: int) -> float:
        return self.objective.count(self.samples.row(index))
