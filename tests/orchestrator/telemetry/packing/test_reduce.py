"""Fewer points, same picture: extremes, ends, every planted spike and every mark are still there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.packing.reduce import LEAST, reduce


@given(
    st.lists(
        st.floats(-1e300, 1e300) | st.just(float("nan")) | st.just(float("inf")),
        min_size=1,
        max_size=400,
    ),
    st.integers(LEAST, 120),
)
def test_ends_and_extremes_stay_within_the_budget(values: list[float], points: int) -> None:
    x, y = np.cumsum(np.ones(len(values))), np.array(values)
    found = reduce(x, y, points)
    assert len(found.x) == len(found.y) <= points
    assert np.all(np.diff(found.x) > 0)
    at = found.x.astype(int) - 1
    assert np.array_equal(y[at], found.y, equal_nan=True)  # points as logged, not made up
    finite = y[np.isfinite(y)]
    if len(finite):
        kept = found.y[np.isfinite(found.y)]
        assert (kept.min(), kept.max(), kept[0], kept[-1]) == (
            finite.min(),
            finite.max(),
            finite[0],
            finite[-1],
        )
    bad = np.flatnonzero(~np.isfinite(y))
    if len(y) <= points or len(bad) <= points // 4:
        assert set(bad) <= set(at)
    elif len(bad):
        assert (~np.isfinite(found.y)).any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_spikes_are_kept_even_two_in_a_bucket(seed: int) -> None:
    draw = np.random.default_rng(seed)
    y = 3 + 2 * np.exp(-np.arange(200_000) / 20_000) + draw.normal(size=200_000) * 0.02
    spikes = np.unique(np.concatenate((draw.choice(200_000, 18, replace=False), [50_000, 50_040])))
    y[spikes] += draw.choice([-1, 1], len(spikes)) * draw.uniform(1, 2, len(spikes))
    found = reduce(np.arange(200_000.0), y, 1500)
    assert len(found.x) <= 1500
    assert set(spikes) <= set(found.x.astype(int))
    assert found.low is not None and found.high is not None
    assert np.all((found.low <= found.y) & (found.y <= found.high))


def test_a_few_points_are_left_alone() -> None:
    found = reduce(np.arange(3.0), np.array([1.0, float("nan"), 2.0]), 10)
    assert (found.low, found.high, len(found.y)) == (None, None, 3)


@pytest.mark.parametrize("points", range(1, LEAST))
def test_very_few_points_are_the_extremes_first(points: int) -> None:
    y = np.array([3.0, 2.0, float("nan"), 9.0, 1.0, *[2.5] * 20])
    found = reduce(np.arange(25.0), y, points)
    assert len(found.x) <= points
    assert {3, 4, 24}.issuperset(found.x.astype(int)) or points > 3
    assert 3 in found.x
