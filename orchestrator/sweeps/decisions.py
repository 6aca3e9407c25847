"""Which trials continue: ASHA's promotions and PBT's replacements. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial at a comparison: its results so far, one per rung; `nan` is worse than all.

    `waits`: it is paused at the rung of its newest result.
    """

    number: int
    results: Sequence[float]
    waits: bool


def better_first(values: Mapping[int, float], *, minimize: bool) -> list[int]:
    """Keys by value, best first; values that are not finite last, ties by key."""

    def place(number: int) -> tuple[bool, float, int]:
        value = values[number]
        finite = math.isfinite(value)
        return not finite, (value if minimize else -value) if finite else 0.0, number

    return sorted(values, key=place)


def promotable(
    trials: Sequence[Measured], *, factor: int, rungs: int, minimize: bool
) -> int | None:
    """The waiting trial to continue: in the best 1/factor of its rung; the highest rung first.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning" (2020), algorithm 2.
    """
    for rung in range(rungs - 1, -1, -1):
        values = {each.number: each.results[rung] for each in trials if len(each.results) > rung}
        best = better_first(values, minimize=minimize)[: len(values) // factor]
        waiting = {each.number for each in trials if each.waits and len(each.results) == rung + 1}
        for number in best:
            if number in waiting and math.isfinite(values[number]):
                return number
    return None


def last_resort(trials: Sequence[Measured], *, minimize: bool) -> int | None:
    """The best waiting trial of the highest rung: the one that finishes if no other did."""
    waiting = [each for each in trials if each.waits and math.isfinite(each.results[-1])]
    if not waiting:
        return None
    highest = max(len(each.results) for each in waiting)
    values = {each.number: each.results[-1] for each in waiting if len(each.results) == highest}
    return better_first(values, minimize=minimize)[0]


def replacements(
    values: Mapping[int, float], *, quantile: float, minimize: bool, draw: random.Random
) -> dict[int, int]:
    """Worst trials of a population → trials of the best whose checkpoints they continue.

    Truncation selection, Jaderberg et al. (2017). Values that are not finite are replaced always,
    as long as one is finite.
    """
    order = better_first(values, minimize=minimize)
    finite = [number for number in order if math.isfinite(values[number])]
    if not finite or len(order) < 2:
        return {}
    count = max(1, math.floor(quantile * len(order)))
    best = finite[: max(1, min(count, len(order) - 1))]
    worst = {*order[-count:], *(number for number in order if number not in finite)} - set(best)
    return {number: draw.choice(best) for number in order if number in worst}
