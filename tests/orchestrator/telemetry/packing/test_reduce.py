"""Reduction preserves extremes, ends, planted spikes and non-finite markers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.telemetry.packing.reduce import MIN_BUCKETED, reduce


@given(
    st.lists(
        st.floats(-1e300, 1e300) | st.just(float("nan")) | st.just(float("inf")),
        min_size=1,
        max_size=400,
    ),
    st.integers(MIN_BUCKETED, 120),
)
def test_ends_and_extremes_stay_within_the_budget(values: list[float], points: int) -> None:
    x, y = np.cumsum(np.ones(len(values))), np.array(values)
    reduced = reduce(x, y, points)
    assert len(reduced.x) == len(reduced.y) <= points
    assert np.all(np.diff(reduced.x) > 0)
    at = reduced.x.astype(int) - 1
    assert np.array_equal(y[at], reduced.y, equal_nan=True)  # points as logged
    finite = y[np.isfinite(y)]
    if len(finite):
        chosen = reduced.y[np.isfinite(reduced.y)]
        assert (chosen.min(), chosen.max(), chosen[0], chosen[-1]) == (
            finite.min(),
            finite.max(),
            finite[0],
            finite[-1],
        )
    bad = np.flatnonzero(~np.isfinite(y))
    if len(y) <= points or len(bad) <= points // 4:
        assert set(bad) <= set(at)
    elif len(bad):
        assert (~np.isfinite(reduced.y)).any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_spikes_are_preserved_even_two_in_a_bucket(seed: int) -> None:
    draw = np.random.default_rng(seed)
    y = 3 + 2 * np.exp(-np.arange(200_000) / 20_000) + draw.normal(size=200_000) * 0.02
    spikes = np.unique(np.concatenate((draw.choice(200_000, 18, replace=False), [50_000, 50_040])))
    y[spikes] += draw.choice([-1, 1], len(spikes)) * draw.uniform(1, 2, len(spikes))
    reduced = reduce(np.arange(200_000.0), y, 1500)
    assert len(reduced.x) <= 1500
    assert set(spikes) <= set(reduced.x.astype(int))
    assert reduced.low is not None and reduced.high is not None
    assert np.all((reduced.low <= reduced.y) & (reduced.y <= reduced.high))


def test_a_few_points_are_unchanged() -> None:
    reduced = reduce(np.arange(3.0), np.array([1.0, float("nan"), 2.0]), 10)
    assert (reduced.low, reduced.high, len(reduced.y)) == (None, None, 3)


@pytest.mark.parametrize("points", range(1, MIN_BUCKETED))
def test_very_few_points_are_the_extremes_first(points: int) -> None:
    y = np.array([3.0, 2.0, float("nan"), 9.0, 1.0, *[2.5] * 20])
    reduced = reduce(np.arange(25.0), y, points)
    assert len(reduced.x) <= points
    assert {3, 4, 24}.issuperset(reduced.x.astype(int)) or points > 3
    assert 3 in reduced.x
