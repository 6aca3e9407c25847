"""A picture of metrics before and after training: differences with intervals. Pure functions.

Each metric has its own scale, symmetric around no difference; better is to the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.contracts.wire.serving_reports import ComparedMetric

WIDTH: Final = 200.0  # of the drawing, in its own units
_LESS: Final = ("loss", "perplexity", "bits_per_byte")
_FILL: Final = 0.9  # share of the half width that the largest number takes


@dataclass(frozen=True, slots=True)
class IntervalMark:
    """Places on an axis from 0 to WIDTH: the difference and the ends of its interval."""

    at: float
    low: float | None
    high: float | None
    verdict: str


def mark(compared: ComparedMetric) -> IntervalMark | None:
    """The mark of a metric; None if it has neither a difference nor an interval."""
    sign = -1.0 if compared.name in _LESS else 1.0
    difference = sign * (compared.after - compared.before)
    ends = [sign * each for each in (compared.low, compared.high) if each is not None]
    largest = max(abs(each) for each in (difference, *ends))
    if largest == 0:
        return IntervalMark(WIDTH / 2, None, None, compared.verdict)
    scale = _FILL * WIDTH / 2 / largest
    places = sorted(WIDTH / 2 + scale * each for each in ends)
    low, high = (round(places[0], 2), round(places[1], 2)) if len(places) == 2 else (None, None)
    return IntervalMark(round(WIDTH / 2 + scale * difference, 2), low, high, compared.verdict)
