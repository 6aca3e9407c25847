"""Summaries of up to 256 points or summaries, from which charts show every spike of a long series.

A summary is one row of `WIDTH` float64. Non-finite values are counted separately with their places
for markers; minimum, maximum and mean exclude them. Pure NumPy.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from orchestrator.telemetry.packing.chunks import EMPTY, Curve, Floats, Mask

COUNT: Final = 0  # points
BAD: Final = 1  # non-finite points
LOW: Final = 2
HIGH: Final = 3
MEAN: Final = 4
FIRST: Final = 5
LAST: Final = 6
_PLACES: Final = 7

# axes, in the order of their blocks of six columns
AXES: Final = ("seq", "step", "tokens", "time")
# columns of each block: smallest and largest place, places of the extremes, places of the first and
# last non-finite point
FROM, TO, AT_LOW, AT_HIGH, AT_BAD, AT_LAST_BAD = range(6)
WIDTH: Final = _PLACES + 6 * len(AXES)


def place(axis: int, what: int) -> int:
    """Column index of a place, e.g. `place(1, AT_LOW)`: the step of the minimum."""
    return _PLACES + 6 * axis + what


def summarize(curve: Curve) -> Floats:
    """`[WIDTH]` summary of an ordered curve of at least one point."""
    summary: Floats = summarize_rows(curve_axes(curve), curve.y[None, :])[0]
    return summary


def curve_axes(curve: Curve) -> Floats:
    """`[4, n]` places on all axes."""
    axes = np.empty((len(AXES), len(curve)))
    axes[:3] = curve.axes
    axes[3] = curve.time
    return axes


def summarize_rows(axes: Floats, values: Floats) -> Floats:
    """`[m, WIDTH]` of m curves with shared places: `axes` [4, n], `values` [m, n], n at least 1."""
    rows = np.arange(len(values))
    good = np.isfinite(values)
    bad = values.shape[1] - good.sum(axis=1)
    if bad.any():
        at_low = np.where(good, values, np.inf).argmin(axis=1)
        at_high = np.where(good, values, -np.inf).argmax(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(good, values, 0.0).sum(axis=1) / (values.shape[1] - bad)
    else:
        at_low, at_high, mean = values.argmin(axis=1), values.argmax(axis=1), values.mean(axis=1)
    summary = np.empty((len(values), WIDTH))
    summary[:, COUNT] = values.shape[1]
    summary[:, BAD] = bad
    summary[:, LOW], summary[:, HIGH], summary[:, MEAN] = (
        values[rows, at_low],
        values[rows, at_high],
        mean,
    )
    summary[:, FIRST], summary[:, LAST] = values[:, 0], values[:, -1]
    first_bad, last_bad = (
        (~good).argmax(axis=1),
        values.shape[1] - 1 - (~good)[:, ::-1].argmax(axis=1),
    )
    for axis, places in enumerate(axes):
        summary[:, place(axis, FROM)], summary[:, place(axis, TO)] = places.min(), places.max()
        summary[:, place(axis, AT_LOW)], summary[:, place(axis, AT_HIGH)] = (
            places[at_low],
            places[at_high],
        )
        summary[:, place(axis, AT_BAD)] = np.where(bad > 0, places[first_bad], np.nan)
        summary[:, place(axis, AT_LAST_BAD)] = np.where(bad > 0, places[last_bad], np.nan)
    all_bad = bad == values.shape[1]
    if all_bad.any():
        summary[all_bad, LOW : MEAN + 1] = np.nan
    return summary


def merge(summaries: Floats) -> Floats:
    """One summary `[WIDTH]` of `[k, WIDTH]` ordered summaries."""
    summary = np.empty(WIDTH)
    good = summaries[:, COUNT] - summaries[:, BAD]
    summary[COUNT], summary[BAD] = summaries[:, COUNT].sum(), summaries[:, BAD].sum()
    some = good > 0
    low = int(np.where(some, summaries[:, LOW], np.inf).argmin())
    high = int(np.where(some, summaries[:, HIGH], -np.inf).argmax())
    summary[LOW], summary[HIGH] = summaries[low, LOW], summaries[high, HIGH]
    summary[MEAN] = (
        (np.where(some, summaries[:, MEAN], 0.0) * good).sum() / good.sum()
        if some.any()
        else np.nan
    )
    summary[FIRST], summary[LAST] = summaries[0, FIRST], summaries[-1, LAST]
    bad = np.flatnonzero(summaries[:, BAD] > 0)
    for axis in range(len(AXES)):
        summary[place(axis, FROM)] = summaries[:, place(axis, FROM)].min()
        summary[place(axis, TO)] = summaries[:, place(axis, TO)].max()
        summary[place(axis, AT_LOW)] = summaries[low, place(axis, AT_LOW)]
        summary[place(axis, AT_HIGH)] = summaries[high, place(axis, AT_HIGH)]
        summary[place(axis, AT_BAD)] = (
            summaries[bad[0], place(axis, AT_BAD)] if len(bad) else np.nan
        )
        summary[place(axis, AT_LAST_BAD)] = (
            summaries[bad[-1], place(axis, AT_LAST_BAD)] if len(bad) else np.nan
        )
    return summary


def marks(summaries: Floats) -> Curve:
    """Points that represent the summaries: first, minimum, maximum, last; NaN for non-finite.

    Contains every summary's extremes at their true places, sorted by step.
    """
    if not len(summaries):
        return EMPTY
    finite: Mask = summaries[:, COUNT] > summaries[:, BAD]
    broken: Mask = summaries[:, BAD] > 0
    nan = np.full(len(summaries), np.nan)
    taken = [
        (summaries[:, FIRST], FROM, np.isfinite(summaries[:, FIRST])),
        (summaries[:, LOW], AT_LOW, finite),
        (summaries[:, HIGH], AT_HIGH, finite),
        (summaries[:, LAST], TO, np.isfinite(summaries[:, LAST])),
        (nan, AT_BAD, broken),
        (nan, AT_LAST_BAD, broken & (summaries[:, BAD] > 1)),
    ]
    y = np.concatenate([values[keep] for values, _, keep in taken])
    axes = [
        np.concatenate([summaries[keep, place(axis, what)] for _, what, keep in taken])
        for axis in range(4)
    ]
    # the first point of a chunk may also be its minimum
    return Curve(np.array(axes[:3]).astype(np.int64), axes[3], y).once()


def pack(summaries: Floats) -> bytes:
    """Compress `[k, WIDTH]`."""
    return zlib.compress(
        np.ascontiguousarray(summaries).view(np.uint8).reshape(-1, 8).T.tobytes(), 1
    )


def unpack(data: bytes | memoryview) -> Floats:
    """Inverse of `pack`: `[k, WIDTH]`."""
    raw = np.frombuffer(zlib.decompress(data), np.uint8).reshape(8, -1)
    return raw.T.copy().view(np.float64).reshape(-1, WIDTH)
