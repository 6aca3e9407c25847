"""Chooses how many cases of a parametrized test run: a reduced list, or all of them.

The environment variable ORRERY_TEST_MATRIX=full selects all cases (`make test-all` sets it):

    from tests.matrix import FULL, pairwise, select

    @pytest.mark.parametrize("shape", select(SHAPES, 1))       # the first shape
    @pytest.mark.parametrize("shape", select(SHAPES, [2, 5]))  # these two shapes
    @pytest.mark.parametrize(("dtype", "shape"), pairwise(DTYPES, SHAPES))

Order cases from the most to the least demanding, or name the default ones by index. A default
list must keep the edges (ragged sizes, masks, empty inputs) covered.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

FULL: bool = os.environ.get("ORRERY_TEST_MATRIX", "") == "full"


def select(cases: Iterable[T], default: int | Sequence[int] = 1) -> list[T]:
    """All cases if FULL; else the first `default` ones, or those at the indices in `default`."""
    every = list(cases)
    if FULL:
        return every
    return every[:default] if isinstance(default, int) else [every[i] for i in default]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The full product of the axes if FULL; else few rows that hold each pair of two axes' values.

    The reduced list is deterministic and starts with the first value of each axis.
    """
    product = list(itertools.product(*axes))
    if FULL or len(axes) < 3:
        return product
    index_rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    columns = list(itertools.combinations(range(len(axes)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in columns}

    missing = set().union(*map(pairs, index_rows))
    rows = []
    while missing:
        best = max(index_rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return rows
