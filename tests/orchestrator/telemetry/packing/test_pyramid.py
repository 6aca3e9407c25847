"""Summaries of points equal merged summaries, with every extreme at its true place."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.telemetry.packing import pyramid
from orchestrator.telemetry.packing.chunks import Curve


def curve(y: np.ndarray) -> Curve:  # type: ignore[type-arg]
    count = np.arange(1, len(y) + 1)
    return Curve(np.array([count, count * 10, count * 4096]), 1.79e9 + count * 0.25, y)


def values(seed: int, bad: float) -> np.ndarray:  # type: ignore[type-arg]
    draw = np.random.default_rng(seed)
    y = draw.normal(size=1024)
    y[draw.random(1024) < bad] = np.nan
    return y


@pytest.mark.parametrize("bad", [0.0, 0.02, 1.0])
def test_summaries_of_summaries_are_summaries_of_points(bad: float) -> None:
    full = curve(values(1, bad))
    parts = [pyramid.summarize(full.take(np.arange(at, at + 256))) for at in range(0, 1024, 256)]
    merged = pyramid.unpack(pyramid.pack(pyramid.merge(np.array(parts))[None, :]))[0]
    assert np.allclose(merged, pyramid.summarize(full), rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("bad", [0.0, 0.02, 1.0])
def test_marks_are_points_of_the_curve_and_hold_its_extremes(bad: float) -> None:
    full = curve(values(2, bad))
    rows = np.array(
        [pyramid.summarize(full.take(np.arange(at, at + 256))) for at in range(0, 1024, 256)]
    )
    marks = pyramid.marks(rows)
    at = marks.seq - 1
    assert np.array_equal(full.step[at], marks.step)
    assert np.array_equal(full.time[at], marks.time)
    finite = np.isfinite(marks.y)
    assert np.array_equal(full.y[at][finite], marks.y[finite])
    assert np.isnan(full.y[at][~finite]).all()
    for start in range(0, 1024, 256):
        part = full.y[start : start + 256]
        here = marks.y[(at >= start) & (at < start + 256)]
        assert np.isnan(here).any() == np.isnan(part).any()
        if not np.isnan(part).all():
            assert (np.nanmin(here), np.nanmax(here)) == (np.nanmin(part), np.nanmax(part))
