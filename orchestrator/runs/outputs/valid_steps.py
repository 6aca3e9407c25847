"""Chooses, of what a run's attempts wrote at steps, what belongs to its present course."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def without_discarded_steps(
    items: Iterable[tuple[int, int, T]], rewinds: Sequence[tuple[int, int]]
) -> list[tuple[int, T]]:
    """`(step, item)` by ascending step of `(attempt, step, item)` in the order of writing.

    A rewind `(attempt, step)` discards what attempts up to that one wrote after the step; an item
    replaces earlier ones at its step and after it.
    """
    valid: list[tuple[int, T]] = []
    for attempt, step, item in items:
        if any(attempt <= number and step > last for number, last in rewinds):
            continue
        while valid and valid[-1][0] >= step:
            valid.pop()
        valid.append((step, item))
    return valid
