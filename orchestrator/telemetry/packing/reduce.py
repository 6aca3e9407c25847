"""Reduces a chart's points and preserves every spike and non-finite marker. Pure NumPy.

Each bucket of equal width on the axis keeps its minimum and maximum. Two spikes in one bucket would
lose one, so an eighth of the points goes to those farthest from the line between their neighbors.
(Every-k-th-point methods lose spikes; largest-triangle methods take 20 times as long.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.telemetry.packing.chunks import Floats, Ints, Mask

# below this number of points there are no buckets: extremes, ends and a marker, in this order
MIN_BUCKETED = 8


@dataclass(frozen=True, slots=True)
class Reduced:
    """Logged points `x`, `y` [n]; `low`, `high` [n] are their bucket's extremes, None if exact."""

    x: Floats
    y: Floats
    low: Floats | None
    high: Floats | None


def reduce(x: Floats, y: Floats, points: int) -> Reduced:
    """Select at most `points` points; `x` must be sorted.

    At most a quarter of them are non-finite markers.
    """
    if len(x) <= points:
        return Reduced(x, y, None, None)
    finite = np.isfinite(y)
    good, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
    if points < MIN_BUCKETED:
        return _extremes(x, y, good, bad, points)
    if len(bad) > points // 4:
        bad = bad[_starts(_buckets(x[bad], points // 4))]
    if not len(good):
        return Reduced(x[bad], y[bad], y[bad], y[bad])
    jumps = points // 8
    ids = _buckets(x[good], (points - 2 - len(bad) - jumps) // 2)
    starts = _starts(ids)
    lows, highs = np.minimum.reduceat(y[good], starts), np.maximum.reduceat(y[good], starts)
    ids = _ranks(ids)
    chosen = np.concatenate(
        (
            [good[0], good[-1]],
            good[_first_hits(y[good] == lows[ids], ids)],
            good[_first_hits(y[good] == highs[ids], ids)],
            good[_farthest_jumps(y[good], jumps)],
            bad,
        )
    )
    chosen = np.unique(chosen)
    # a marker has the band of the finite point before it
    bucket = ids[np.clip(np.searchsorted(good, chosen, side="right") - 1, 0, None)]
    return Reduced(x[chosen], y[chosen], lows[bucket], highs[bucket])


def _extremes(x: Floats, y: Floats, good: Ints, bad: Ints, points: int) -> Reduced:
    """The first `points` of highest, lowest, last, first, first marker; at least one."""
    wanted = [int(good[np.argmax(y[good])]), int(good[np.argmin(y[good])])] if len(good) else []
    wanted += [len(y) - 1, 0, *(int(at) for at in bad[:1])]
    chosen = np.sort(np.array(list(dict.fromkeys(wanted))[: max(points, 1)], dtype=np.int64))
    low, high = (float(y[good].min()), float(y[good].max())) if len(good) else (np.nan, np.nan)
    return Reduced(x[chosen], y[chosen], np.full(len(chosen), low), np.full(len(chosen), high))


def _buckets(x: Floats, count: int) -> Ints:
    """The bucket of each place; buckets have equal width from the first to the last place."""
    count = max(count, 1)
    width = x[-1] - x[0]
    if not width > 0:
        return np.zeros(len(x), np.int64)
    ids: Ints = np.minimum(((x - x[0]) * (count / width)).astype(np.int64), count - 1)
    return ids


def _starts(ids: Ints) -> Ints:
    """Index of the first point of each bucket; `ids` ascends."""
    return np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))


def _ranks(ids: Ints) -> Ints:
    """Buckets renumbered without gaps."""
    ranks: Ints = np.concatenate(([0], np.cumsum(ids[1:] != ids[:-1])))
    return ranks


def _first_hits(hit: Mask, ids: Ints) -> Ints:
    """Index of the first hit in each bucket."""
    indices = np.flatnonzero(hit)
    hits: Ints = indices[_starts(ids[indices])]
    return hits


def _farthest_jumps(y: Floats, count: int) -> Ints:
    """Indices of the points farthest from the mean of their two neighbors."""
    if len(y) < count + 3:
        return np.arange(0)
    jump = np.abs(y[1:-1] - (y[:-2] + y[2:]) / 2)
    return np.argpartition(jump, len(jump) - count)[len(jump) - count :] + 1
