"""Which outputs to save within a byte budget so that the recomputed time is least, by dynamic
programming.

First over the operators of a block (0/1 knapsack: each budget's best set), then over layers, each
with one of its block's sets (multiple-choice knapsack; both as in Kellerer, Pferschy, Pisinger,
Knapsack Problems, 2004, 2.3 and 11.5). Does not depend on operators or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BUCKETS = 1 << 12
SETS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """`items` saved in `bytes`; `seconds` are left to recompute."""

    bytes: int
    seconds: float
    items: tuple[int, ...] = ()


def best_sets(bytes_: Sequence[int], seconds: Sequence[float]) -> list[Choice]:
    """Pareto-optimal sets in bytes and time left, from no item to all useful items.

    Exact if sizes have a common divisor of at least their sum / BUCKETS, as tensors of a block do;
    otherwise sizes are rounded up to that. At most SETS evenly spaced sets.
    """
    useful = [
        i
        for i, (size, time) in enumerate(zip(bytes_, seconds, strict=True))
        if size > 0 and time > 0
    ]
    total, every = sum(seconds), sum(bytes_[i] for i in useful)
    if not useful:
        return [Choice(0, total)]
    unit = max(math.gcd(*(bytes_[i] for i in useful)), -(-every // BUCKETS))
    sizes = [-(-bytes_[i] // unit) for i in useful]
    room = sum(sizes)
    saved = np.zeros(room + 1)
    took = np.zeros((len(useful), room + 1), dtype=bool)
    for row, (item, size) in enumerate(zip(useful, sizes, strict=True)):
        more = np.concatenate((np.full(size, -1.0), saved[:-size] + seconds[item]))
        took[row] = more > saved
        saved = np.maximum(saved, more)
    # `saved` never falls with room; where it rises, a new best set begins
    places = np.flatnonzero(np.diff(saved, prepend=-1.0) > 0)
    if len(places) > SETS:
        places = places[np.unique(np.linspace(0, len(places) - 1, SETS).round().astype(int))]
    results = []
    for place in places.tolist():
        items, left = [], place
        for row in range(len(useful) - 1, -1, -1):
            if took[row, left]:
                items.append(useful[row])
                left -= sizes[row]
        chosen = tuple(sorted(items))
        seconds_left = total - sum(seconds[i] for i in chosen)
        results.append(Choice(sum(bytes_[i] for i in chosen), max(0.0, seconds_left), chosen))
    return results


def choose_sets(layers: Sequence[Sequence[Choice]], budget_bytes: int) -> list[int]:
    """The index of each layer's choice with the least total time within the budget.

    Raises ValueError if the smallest choices exceed the budget.
    """
    least = [min(choice.bytes for choice in choices) for choices in layers]
    left = budget_bytes - sum(least)
    if left < 0:
        raise ValueError(f"{budget_bytes} bytes are less than the minimum of {sum(least)}")
    fastest = [min(range(len(choices)), key=lambda i: choices[i].seconds) for choices in layers]
    if (
        sum(choices[place].bytes for choices, place in zip(layers, fastest, strict=True))
        <= budget_bytes
    ):
        return fastest  # the budget is rounded down below
    beyond = [[c.bytes - low for c in choices] for choices, low in zip(layers, least, strict=True)]
    left = min(left, sum(max(sizes) for sizes in beyond))
    unit = max(
        1, math.gcd(*(size for sizes in beyond for size in sizes)), -(-left // (4 * BUCKETS))
    )
    room = left // unit
    time = np.zeros(room + 1)
    taken: list[np.ndarray] = []
    for choices, sizes in zip(layers, beyond, strict=True):
        best, which = np.full(room + 1, np.inf), np.zeros(room + 1, dtype=np.int32)
        for place, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
            step = -(-size // unit)
            if step > room:
                continue
            with_it = np.full(room + 1, np.inf)
            with_it[step:] = time[: room + 1 - step] + choice.seconds
            better = with_it < best
            best[better], which[better] = with_it[better], place
        time = best
        taken.append(which)
    results, place = [], room
    for sizes, which in zip(reversed(beyond), reversed(taken), strict=True):
        results.append(int(which[place]))
        place -= -(-sizes[results[-1]] // unit)
    return results[::-1]
