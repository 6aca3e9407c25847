"""Errors of predictions against measurements: of size, of rank, of intervals, of verdicts.

Arrays in, numbers out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mean_error(predicted: Floats, measured: Floats) -> float:
    """Mean of |predicted / measured - 1|, in percent."""
    return float(100 * np.abs(predicted / measured - 1).mean())


def coverage(low: Floats, high: Floats, measured: Floats) -> float:
    """Share of measurements inside their interval, in percent."""
    return float(100 * ((measured >= low) & (measured <= high)).mean())


def median_width(low: Floats, high: Floats, predicted: Floats) -> float:
    """Median of (high - low) / predicted, in percent."""
    return float(100 * np.median((high - low) / predicted))


def regret(predicted: Floats, measured: Floats, groups: Sequence[Hashable]) -> Floats:
    """Of each group of two or more plans: how much longer the plan predicted best took than the
    best, in percent.
    """
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    found = []
    for each in rows.values():
        if len(each) > 1:
            chosen = each[int(predicted[each].argmin())]
            found.append(100 * (measured[chosen] / measured[each].min() - 1))
    return np.array(found)


def spearman(predicted: Floats, measured: Floats) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])


@dataclass(frozen=True)
class Verdicts:
    """Of runs whose end is known: how many `fits` were wrong, and what share of those that ran was
    refused.
    """

    ran: int
    out_of_memory: int
    false_fits: int
    false_refusals: int


def verdicts(fits: NDArray[np.bool_], out_of_memory: NDArray[np.bool_]) -> Verdicts:
    return Verdicts(
        int((~out_of_memory).sum()),
        int(out_of_memory.sum()),
        int((fits & out_of_memory).sum()),
        int((~fits & ~out_of_memory).sum()),
    )


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place.reshape(-1)], float)
