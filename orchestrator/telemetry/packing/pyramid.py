"""Summaries of up to 256 points, or of 256 summaries: what a chart needs to show every spike of a
long series.

A summary is one row of `WIDTH` float64. Numbers that are not finite are counted apart and their
places kept, so that
they can be marked; they enter neither minimum, maximum nor mean. Knows arrays only.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from orchestrator.telemetry.packing.chunks import EMPTY, Curve, Floats, Mask

COUNT: Final = 0  # points
BAD: Final = 1  # of them not finite
LOW: Final = 2
HIGH: Final = 3
MEAN: Final = 4
FIRST: Final = 5
LAST: Final = 6
_PLACES: Final = 7

# axes, in the order of their blocks of six columns
AXES: Final = ("seq", "step", "tokens", "time")
# what each block holds: the smallest and largest place, those of the extremes, those of the outer
# non-finite points
FROM, TO, AT_LOW, AT_HIGH, AT_BAD, AT_LAST_BAD = range(6)
WIDTH: Final = _PLACES + 6 * len(AXES)


def place(axis: int, what: int) -> int:
    """Column of one place, e.g. `place(1, AT_LOW)`: the step of the minimum."""
    return _PLACES + 6 * axis + what


def summarise(curve: Curve) -> Floats:
    """`[WIDTH]` of a curve of at least one point, in order."""
    found: Floats = summarise_rows(axes_of(curve), curve.y[None, :])[0]
    return found


def axes_of(curve: Curve) -> Floats:
    """`[4, n]` places on all axes."""
    axes = np.empty((len(AXES), len(curve)))
    axes[:3] = curve.axes
    axes[3] = curve.time
    return axes


def summarise_rows(axes: Floats, values: Floats) -> Floats:
    """`[m, WIDTH]` of m curves that share their places: `axes` [4, n], `values` [m, n], n at least
    1.
    """
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
    found = np.empty((len(values), WIDTH))
    found[:, COUNT] = values.shape[1]
    found[:, BAD] = bad
    found[:, LOW], found[:, HIGH], found[:, MEAN] = (
        values[rows, at_low],
        values[rows, at_high],
        mean,
    )
    found[:, FIRST], found[:, LAST] = values[:, 0], values[:, -1]
    first_bad, last_bad = (
        (~good).argmax(axis=1),
        values.shape[1] - 1 - (~good)[:, ::-1].argmax(axis=1),
    )
    for axis, places in enumerate(axes):
        found[:, place(axis, FROM)], found[:, place(axis, TO)] = places.min(), places.max()
        found[:, place(axis, AT_LOW)], found[:, place(axis, AT_HIGH)] = (
            places[at_low],
            places[at_high],
        )
        found[:, place(axis, AT_BAD)] = np.where(bad > 0, places[first_bad], np.nan)
        found[:, place(axis, AT_LAST_BAD)] = np.where(bad > 0, places[last_bad], np.nan)
    whole = bad == values.shape[1]
    if whole.any():
        found[whole, LOW : MEAN + 1] = np.nan
    return found


def merge(summaries: Floats) -> Floats:
    """One summary `[WIDTH]` of several `[k, WIDTH]`, in order."""
    found = np.empty(WIDTH)
    good = summaries[:, COUNT] - summaries[:, BAD]
    found[COUNT], found[BAD] = summaries[:, COUNT].sum(), summaries[:, BAD].sum()
    some = good > 0
    low = int(np.where(some, summaries[:, LOW], np.inf).argmin())
    high = int(np.where(some, summaries[:, HIGH], -np.inf).argmax())
    found[LOW], found[HIGH] = summaries[low, LOW], summaries[high, HIGH]
    found[MEAN] = (
        (np.where(some, summaries[:, MEAN], 0.0) * good).sum() / good.sum()
        if some.any()
        else np.nan
    )
    found[FIRST], found[LAST] = summaries[0, FIRST], summaries[-1, LAST]
    bad = np.flatnonzero(summaries[:, BAD] > 0)
    for axis in range(len(AXES)):
        found[place(axis, FROM)] = summaries[:, place(axis, FROM)].min()
        found[place(axis, TO)] = summaries[:, place(axis, TO)].max()
        found[place(axis, AT_LOW)] = summaries[low, place(axis, AT_LOW)]
        found[place(axis, AT_HIGH)] = summaries[high, place(axis, AT_HIGH)]
        found[place(axis, AT_BAD)] = summaries[bad[0], place(axis, AT_BAD)] if len(bad) else np.nan
        found[place(axis, AT_LAST_BAD)] = (
            summaries[bad[-1], place(axis, AT_LAST_BAD)] if len(bad) else np.nan
        )
    return found


def marks(summaries: Floats) -> Curve:
    """The points that stand for the summaries: first, minimum, maximum, last, and the outer
    non-finite ones as NaN.

    Every extreme of every summary is among them with its true place; they are sorted by step.
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
    # once: the first point of a chunk may also be its minimum
    return Curve(np.array(axes[:3]).astype(np.int64), axes[3], y).once()


def pack(summaries: Floats) -> bytes:
    return zlib.compress(
        np.ascontiguousarray(summaries).view(np.uint8).reshape(-1, 8).T.tobytes(), 1
    )


def unpack(data: bytes | memoryview) -> Floats:
    """`[k, WIDTH]`"""
    raw = np.frombuffer(zlib.decompress(data), np.uint8).reshape(8, -1)
    return raw.T.copy().view(np.float64).reshape(-1, WIDTH)
