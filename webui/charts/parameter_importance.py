"""How strongly each configuration value goes along with a metric over runs. Pure functions.

Numbers: the size of Spearman's rank correlation. Texts: the correlation ratio of ranks over groups
(as in the Kruskal-Wallis test, the root of the share of variance between groups). Both are from 0
to 1 and need no model, so they hold for few runs; neither shows effects of several values together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEAST: Final = 5  # runs with both values
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Importance:
    """`strength` from 0 to 1; `direction` is the sign of a correlation, 0 for texts."""

    name: str
    strength: float
    direction: int
    runs: int
    method: str  # spearman or groups


def importances(
    config: Mapping[str, Sequence[Any]], metric: Sequence[float | None]
) -> list[Importance]:
    """The configuration values by strength; both arguments are in the order of the runs.

    Left out: values of fewer than five runs with the metric, and those that do not differ.
    """
    results = []
    for name, values in config.items():
        pairs = [
            (value, y)
            for value, y in zip(values, metric, strict=True)
            if value is not None and y is not None and np.isfinite(y)
        ]
        if len(pairs) < LEAST or len({str(value) for value, _ in pairs}) < 2:
            continue
        ranks = _ranks(np.array([y for _, y in pairs], dtype=np.float64))
        if ranks.std() == 0:
            continue
        if all(
            isinstance(value, int | float) and not isinstance(value, bool) for value, _ in pairs
        ):
            own = _ranks(np.array([value for value, _ in pairs], dtype=np.float64))
            strength = float(np.corrcoef(own, ranks)[0, 1])
            sign = 1 if strength > 0 else -1
            results.append(Importance(name, abs(strength), sign, len(pairs), "spearman"))
            continue
        groups: dict[str, list[float]] = {}
        for (value, _), rank in zip(pairs, ranks, strict=True):
            groups.setdefault(str(value), []).append(float(rank))
        if len(groups) > len(pairs) // 2:  # nearly a group per run explains everything
            continue
        between = sum(
            len(own) * (float(np.mean(own)) - ranks.mean()) ** 2 for own in groups.values()
        )
        ratio = float(np.sqrt(between / (len(pairs) * ranks.var())))
        results.append(Importance(name, min(1.0, ratio), 0, len(pairs), "groups"))
    return sorted(results, key=lambda one: (-one.strength, one.name))


def _ranks(values: _Numbers) -> _Numbers:
    """Ranks from 1; equal values share their mean rank."""
    order = np.argsort(values, kind="stable")
    _, first, counts = np.unique(values[order], return_index=True, return_counts=True)
    ranks = np.empty(len(values), dtype=np.float64)
    ranks[order] = np.repeat(first + (counts + 1) / 2, counts)
    return ranks
