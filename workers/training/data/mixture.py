"""The source of a sample and its number in that source, from the global index and the weights.

Does not depend on tokens or seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PERIOD = 10_000


class Mixture:
    """Interleaves sources evenly in a repeating pattern, so that each has its share after any n
    samples.

    Shares are exact within a period: weights in whole percents repeat after 100 samples or fewer,
    others are rounded to 1 / PERIOD, none to zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights` are positive; only their proportions count. Raises ValueError for others."""
        if not weights or min(weights) <= 0 or not math.isfinite(sum(weights)):
            raise ValueError(f"weights {list(weights)} must be positive numbers")
        self.counts = _counts(weights)
        self.period = sum(self.counts)
        # the j-th of a source's n samples is at (j + 1/2) / n of the period
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        order = np.argsort(places, kind="stable")
        self._source = sources[order]
        firsts = np.cumsum([0, *self.counts[:-1]])
        self._turn = order - firsts[self._source]

    def locate(self, index: int) -> tuple[int, int]:
        """`(source, sample of that source)` of global sample `index`."""
        round_, turn = divmod(index, self.period)
        source = int(self._source[turn])
        return source, round_ * self.counts[source] + int(self._turn[turn])


def _counts(weights: Sequence[float]) -> list[int]:
    """Samples per source in a period, by largest remainders, at least one, without a common
    divisor.
    """
    shares = [weight / sum(weights) * PERIOD for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    left = PERIOD - sum(counts)
    for index in sorted(range(len(shares)), key=lambda k: int(shares[k]) - shares[k])[
        : max(0, left)
    ]:
        counts[index] += 1
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]
