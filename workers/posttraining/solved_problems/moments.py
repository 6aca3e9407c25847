"""Mean and standard deviation of a growing number of samples of a few different values."""

from __future__ import annotations

import math

from torch import Tensor


class Moments:
    """Sums of samples; values that occur often are added with their number."""

    def __init__(self) -> None:
        self._samples = self._sum = self._squares = 0.0

    def add(self, values: Tensor, counts: Tensor) -> None:
        """Add each value as often as its count says."""
        self._samples += float(counts.sum())
        self._sum += float((values * counts).sum())
        self._squares += float((values**2 * counts).sum())

    def mean(self) -> float:
        """The mean of all samples; 0 without any."""
        return self._sum / max(1.0, self._samples)

    def std(self) -> float:
        """Their standard deviation."""
        return math.sqrt(max(0.0, self._squares / max(1.0, self._samples) - self.mean() ** 2))
