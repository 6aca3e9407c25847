"""Fewer points for a chart, with every spike and every mark of a non-finite number kept. Pure
NumPy.

Each bucket of equal width on the axis keeps its smallest and its largest point, so whatever stood
out still does. Of
two spikes in one bucket that keeps one; so an eighth of the points goes to those that jump farthest
from the line
between their neighbours. (Every-k-th-point methods lose spikes; largest-triangle ones take 20 times
as long.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.telemetry.packing.chunks import Floats, Ints, Mask

# fewer points than this have no buckets: the extremes, the ends and a mark, in this order
LEAST = 8


@dataclass(frozen=True, slots=True)
class Reduced:
    """`x`, `y` [n] are points as logged; `low`, `high` [n] their bucket's extremes, None where all
    points are kept.
    """

    x: Floats
    y: Floats
    low: Floats | None
    high: Floats | None


def reduce(x: Floats, y: Floats, points: int) -> Reduced:
    """At most `points` of the points, which must be sorted by `x`.

    At most a quarter of them are non-finite marks.
    """
    if len(x) <= points:
        return Reduced(x, y, None, None)
    finite = np.isfinite(y)
    good, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
    if points < LEAST:
        return _fewest(x, y, good, bad, points)
    if len(bad) > points // 4:
        bad = bad[_starts(_buckets(x[bad], points // 4))]
    if not len(good):
        return Reduced(x[bad], y[bad], y[bad], y[bad])
    jumps = points // 8
    ids = _buckets(x[good], (points - 2 - len(bad) - jumps) // 2)
    starts = _starts(ids)
    lows, highs = np.minimum.reduceat(y[good], starts), np.maximum.reduceat(y[good], starts)
    ids = _ranks(ids)
    kept = np.concatenate(
        (
            [good[0], good[-1]],
            good[_first_hits(y[good] == lows[ids], ids)],
            good[_first_hits(y[good] == highs[ids], ids)],
            good[_farthest_jumps(y[good], jumps)],
            bad,
        )
    )
    kept = np.unique(kept)
    # a mark takes the band of the finite point before it
    bucket = ids[np.clip(np.searchsorted(good, kept, side="right") - 1, 0, None)]
    return Reduced(x[kept], y[kept], lows[bucket], highs[bucket])


def _fewest(x: Floats, y: Floats, good: Ints, bad: Ints, points: int) -> Reduced:
    """Highest, lowest, last, first, first mark: as many of them as asked for, at least one."""
    wanted = [int(good[np.argmax(y[good])]), int(good[np.argmin(y[good])])] if len(good) else []
    wanted += [len(y) - 1, 0, *(int(at) for at in bad[:1])]
    kept = np.sort(np.array(list(dict.fromkeys(wanted))[: max(points, 1)], dtype=np.int64))
    low, high = (float(y[good].min()), float(y[good].max())) if len(good) else (np.nan, np.nan)
    return Reduced(x[kept], y[kept], np.full(len(kept), low), np.full(len(kept), high))


def _buckets(x: Floats, count: int) -> Ints:
    """The bucket of each place: equal widths from the first to the last."""
    count = max(count, 1)
    width = x[-1] - x[0]
    if not width > 0:
        return np.zeros(len(x), np.int64)
    found: Ints = np.minimum(((x - x[0]) * (count / width)).astype(np.int64), count - 1)
    return found


def _starts(ids: Ints) -> Ints:
    """Where each bucket begins; `ids` ascends."""
    return np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))


def _ranks(ids: Ints) -> Ints:
    """Buckets renumbered without holes."""
    ranks: Ints = np.concatenate(([0], np.cumsum(ids[1:] != ids[:-1])))
    return ranks


def _first_hits(hit: Mask, ids: Ints) -> Ints:
    """Index of the first hit in each bucket."""
    found = np.flatnonzero(hit)
    hits: Ints = found[_starts(ids[found])]
    return hits


def _farthest_jumps(y: Floats, count: int) -> Ints:
    """Indices of the points farthest from the middle of their two neighbours."""
    if len(y) < count + 3:
        return np.arange(0)
    jump = np.abs(y[1:-1] - (y[:-2] + y[2:]) / 2)
    return np.argpartition(jump, len(jump) - count)[len(jump) - count :] + 1
