"""Running selections match a sort of all rows."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.search.pareto import Front, TopRows, thinned, undominated


def stream(seed: int, n: int = 900):
    draw = np.random.default_rng(seed)
    # few distinct values, so that equal ones are common
    first, second = draw.integers(1, 60, n).astype(float), draw.integers(1, 60, n).astype(float)
    cuts = np.sort(draw.integers(0, n, 12))
    return first, second, [part for part in np.split(np.arange(n), cuts) if part.size]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_a_stream_match_a_full_sort(seed: int) -> None:
    first, second, parts = stream(seed)
    best = TopRows(17)
    for part in parts:
        best.add([first[part], second[part]], part)
    expected = np.lexsort((np.arange(first.size), second, first))[:17]
    assert best.ids.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_front_of_a_stream_matches_the_full_front(seed: int) -> None:
    first, second, parts = stream(seed)
    front = Front()
    for part in parts:
        front.add(first[part], second[part], part)
    points = {
        (a, b)
        for a, b in zip(
            first[undominated([first, second])], second[undominated([first, second])], strict=True
        )
    }
    assert {(a, b) for a, b in zip(front.first, front.second, strict=True)} == points
    assert len(points) == front.ids.size
    # of equal rows the first one stays
    for a, b, row in zip(front.first, front.second, front.ids, strict=True):
        assert row == np.flatnonzero((first == a) & (second == b))[0]


def test_a_third_number_extends_the_front() -> None:
    slow_and_few = undominated([[1.0, 2.0, 2.0], [5.0, 5.0, 6.0], [512.0, 64.0, 64.0]])
    assert slow_and_few.tolist() == [0, 1]


def test_a_thinned_front_includes_both_ends() -> None:
    values = np.sort(np.random.default_rng(0).uniform(0.1, 100, 500))
    stored = thinned(values, 40)
    assert stored[0] == 0 and stored[-1] == 499 and stored.size <= 40
    assert thinned(values[:10], 40).tolist() == list(range(10))
