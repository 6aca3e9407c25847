"""Which outputs to keep within a budget of bytes so that the least time is computed again: dynamic
programming.

First over the operators of a block (0/1 knapsack: every budget's best set), then over layers, each
taking one of its
block's sets (multiple-choice knapsack; both as in Kellerer, Pferschy, Pisinger, Knapsack Problems,
2004, 2.3 and 11.5).
Numbers only; does not know operators or models.
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
    """`kept` items in `bytes`; `seconds` are what is left to be computed again."""

    bytes: int
    seconds: float
    kept: tuple[int, ...] = ()


def best_sets(bytes_: Sequence[int], seconds: Sequence[float]) -> list[Choice]:
    """Sets of items that no other set beats in bytes and time left, from nothing kept to the last
    useful item.

    Exact where sizes have a common divisor of at least a BUCKETS-th of their sum, as tensors of a
    block do; else sizes
    are rounded up to that. Of more than SETS sets, SETS evenly spread ones.
    """
    useful = [
        i
        for i, (size, time) in enumerate(zip(bytes_, seconds, strict=True))
        if size > 0 and time > 0
    ]
    whole, every = sum(seconds), sum(bytes_[i] for i in useful)
    if not useful:
        return [Choice(0, whole)]
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
    found = []
    for place in places.tolist():
        kept, left = [], place
        for row in range(len(useful) - 1, -1, -1):
            if took[row, left]:
                kept.append(useful[row])
                left -= sizes[row]
        chosen = tuple(sorted(kept))
        again = whole - sum(seconds[i] for i in chosen)
        found.append(Choice(sum(bytes_[i] for i in chosen), max(0.0, again), chosen))
    return found


def spread(layers: Sequence[Sequence[Choice]], budget_bytes: int) -> list[int]:
    """For each layer the place of the choice it takes, so that all stay within the budget and take
    the least time.

    Raises ValueError where not even the smallest choices fit.
    """
    least = [min(choice.bytes for choice in choices) for choices in layers]
    left = budget_bytes - sum(least)
    if left < 0:
        raise ValueError(f"{budget_bytes} bytes do not hold the {sum(least)} that are the least")
    fastest = [min(range(len(choices)), key=lambda i: choices[i].seconds) for choices in layers]
    if (
        sum(choices[place].bytes for choices, place in zip(layers, fastest, strict=True))
        <= budget_bytes
    ):
        return fastest  # the room that is divided below is rounded down
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
    found, place = [], room
    for sizes, which in zip(reversed(beyond), reversed(taken), strict=True):
        found.append(int(which[place]))
        place -= -(-sizes[found[-1]] // unit)
    return found[::-1]
