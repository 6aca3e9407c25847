"""Errors of predictions: relative error, ranking, interval coverage, wrong `fits`.

Does not depend on runs or the model.
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
    """Regret of each group of two or more plans, in percent.

    The additional time of the plan predicted best over the plan that is best; inputs are
    `(plans,)`, the result has a row per group.
    """
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    regrets = []
    for members in rows.values():
        if len(members) > 1:
            chosen = members[int(predicted[members].argmin())]
            regrets.append(100 * (measured[chosen] / measured[members].min() - 1))
    return np.array(regrets)


def spearman(predicted: Floats, measured: Floats) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1])


@dataclass(frozen=True)
class FitErrors:
    """Counts of runs by outcome, of wrong `fits` and of wrong refusals."""

    ran: int
    out_of_memory: int
    false_fits: int
    false_refusals: int


def fit_errors(fits: NDArray[np.bool_], out_of_memory: NDArray[np.bool_]) -> FitErrors:
    """Compares predicted `fits` with runs that ran out of memory."""
    return FitErrors(
        int((~out_of_memory).sum()),
        int(out_of_memory.sum()),
        int((fits & out_of_memory).sum()),
        int((~fits & ~out_of_memory).sum()),
    )


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[place.reshape(-1)], float)
