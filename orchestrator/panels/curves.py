"""Data of panels of lines and of heat maps over steps: curves of metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from orchestrator.common.errors import Refusal
from orchestrator.panels.spec import PanelSpec
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors as telemetry
from orchestrator.tracking import selectors as tracking

MOST_CURVES: Final = 100  # of one panel
_POINTS: Final = 24_000  # of all curves of a panel
_FEWEST: Final = 240  # points of a curve; every extreme stays
_MOST: Final = 1200
COLUMNS: Final = 120  # of a heat map
ROWS: Final = 60
_BINS: Final = 40  # of a heat map of logged histograms
_STEPS: Final = 120  # of a heat map of logged histograms


class NoAxis(Exception):
    """No run of the panel has the x axis."""


def lines(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{axis, curves: [{run, metric, x, y, low?, high?, total_points}], unit}`.

    Several runs over time begin at 0: `axis` is then `elapsed`, in seconds. Raises NoAxis.
    """
    wanted = [(run, name) for name in names for run in runs]
    points = min(_MOST, max(_FEWEST, _POINTS // max(1, min(len(wanted), MOST_CURVES))))
    axis = "elapsed" if panel.x == "time" and len(runs) > 1 else panel.x
    is_placed = axis != "elapsed"  # limits of elapsed seconds are applied by the page
    low, high = (panel.x_min, panel.x_max) if is_placed else (None, None)
    curves, unit, without_axis = list[dict[str, Any]](), "", 0
    for run, name in wanted:
        try:
            answer = telemetry.series(
                run=run, name=name, x=panel.x, points=points, from_=low, to=high
            )
        except Refusal:
            without_axis += 1
            continue
        if not answer.x:
            continue
        start = answer.x[0] if axis == "elapsed" else 0
        unit = unit or answer.unit
        if len(curves) < MOST_CURVES:
            curves.append(
                {
                    "run": str(run.pk),
                    "metric": name,
                    "x": [place - start for place in answer.x] if start else answer.x,
                    "y": answer.y,
                    "low": answer.low,
                    "high": answer.high,
                    "total_points": answer.total_points,
                }
            )
    if wanted and without_axis == len(wanted):
        raise NoAxis
    return {"axis": axis, "curves": curves, "unit": unit}


def heat_of_metrics(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """`{axis, x: edges, rows: [{run, metric}], z: [[mean or None]]}`: a row per metric and run.

    Columns divide the axis evenly; a column is the mean of a metric's points in it. Raises NoAxis.
    """
    drawn = lines(panel, runs, names)
    curves = drawn["curves"][:ROWS]
    if not curves:
        return {**drawn, "rows": [], "x": [], "z": []}
    low = min(float(curve["x"][0]) for curve in curves)
    high = max(float(curve["x"][-1]) for curve in curves)
    longest = max(len(curve["x"]) for curve in curves)
    edges = np.linspace(low, high if high > low else low + 1, min(COLUMNS, max(1, longest)) + 1)
    z = [_means(curve["x"], curve["y"], edges) for curve in curves]
    rows = [{"run": curve["run"], "metric": curve["metric"]} for curve in curves]
    rest = {"axis": drawn["axis"], "unit": drawn["unit"], "of": "metrics"}
    return {**rest, "x": edges.tolist(), "rows": rows, "z": z}


def heat_of_histograms(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any] | None:
    """A logged histogram over steps: `{x: steps, y: edges, z: [[count]]}` of the first run with it.

    Counts are spread evenly within their own bins. None without a logged histogram.
    """
    for run, name in ((run, name) for run in runs for name in names):
        items = tracking.media_over_steps(run=run, name=name, kind="histogram", most=_STEPS)
        bodies: list[Any] = [item.body for item in items]
        if not bodies:
            continue
        low = min(float(body["edges"][0]) for body in bodies)
        high = max(float(body["edges"][-1]) for body in bodies)
        edges = np.linspace(low, high, _BINS + 1)
        columns = [rebinned(body["counts"], body["edges"], edges) for body in bodies]
        return {
            "of": "histograms",
            "axis": "step",
            "unit": "",
            "rows": [{"run": str(run.pk), "metric": name}],
            "x": [item.step for item in items],
            "y": edges.tolist(),
            "z": np.array(columns).T.tolist(),
        }
    return None


def rebinned(counts: Sequence[float], edges: Sequence[float], into: Any) -> list[float]:
    """Counts in other bins, as if each count was spread evenly within its bin."""
    cumulative = np.concatenate([[0.0], np.cumsum(np.asarray(counts, float))])
    below = np.interp(into, np.asarray(edges, float), cumulative)
    return [float(value) for value in np.diff(below)]


def _means(x: Sequence[float], y: Sequence[float], edges: Any) -> list[float | None]:
    places = np.clip(np.searchsorted(edges, np.asarray(x, float), "right") - 1, 0, len(edges) - 2)
    values = np.asarray(y, float)
    good = np.isfinite(values)
    sums = np.bincount(places[good], values[good], minlength=len(edges) - 1)
    counts = np.bincount(places[good], minlength=len(edges) - 1)
    return [
        float(total / count) if count else None for total, count in zip(sums, counts, strict=True)
    ]


def finite(values: Sequence[float]) -> Iterator[float]:
    """The values without NaN and infinities."""
    return (value for value in values if math.isfinite(value))
