"""Reads for pages and the API: charts, raw points, newest values, sparklines, memory and logs.

`reading` implements levels and merging. Does not check permissions; callers do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.packing.chunks import Curve, Floats
from orchestrator.telemetry.packing.pyramid import AXES
from orchestrator.telemetry.packing.reduce import reduce
from orchestrator.telemetry.reading.index import (
    SeriesEntry,
    metric_names_of_runs,
    series_index,
)
from orchestrator.telemetry.reading.levels import (
    Source,
    Window,
    iterate,
    sources,
    sources_of_runs,
    with_chunks,
)
from orchestrator.telemetry.reading.logs import LogLine, logs
from orchestrator.telemetry.reading.merge import merge, rewound_steps
from orchestrator.telemetry.reading.newest import (
    latest,
    latest_by_rank,
    latest_of,
    logs_newest,
    memory_by_rank,
)
from orchestrator.telemetry.reading.progress import Progress, progress
from orchestrator.telemetry.reading.sparklines import sparkline
from orchestrator.telemetry.reading.totals import (
    Numbers,
    current_numbers,
    medians,
    numbers_of,
)
from workers.contracts.catalog.metrics import run_metric_unit
from workers.contracts.catalog.model_flops import flops_per_token, training_flops_per_token
from workers.contracts.specs.run import RunSpec

__all__ = [
    "LogLine",
    "Numbers",
    "Progress",
    "SeriesAnswer",
    "SeriesEntry",
    "current_numbers",
    "latest",
    "latest_by_rank",
    "latest_of",
    "logs",
    "logs_newest",
    "medians",
    "memory_by_rank",
    "metric_names_of_runs",
    "numbers_of",
    "progress",
    "run_flops_per_token",
    "series",
    "series_index",
    "series_names",
    "series_of_runs",
    "series_raw",
    "sparkline",
]

Axis = Literal["step", "tokens", "time", "flops"]
MAX_POINTS: Final = 5000
_RUNS: Final = 25  # whose chunks are read at once
_EXACT_CHUNKS = 128  # up to this many chunks (32,768 points) are read completely, 4 ms


@dataclass(frozen=True, slots=True)
class SeriesAnswer:
    """A metric for a chart: `x` in steps, tokens, Unix seconds or FLOPs, `y` in `unit`.

    If points were omitted, `low` and `high` are the extremes of each point's bucket; the points
    include every extreme. `total_points` counts the selected points, `last_seq` is the newest
    point's number in its attempt.
    """

    name: str
    unit: str
    rank: int | None
    attempt: int | None
    axis: str
    x: list[float]
    y: list[float]
    low: list[float] | None
    high: list[float] | None
    total_points: int
    last_seq: int

    def to_dict(self) -> dict[str, Any]:
        """Data of the REST response; non-finite numbers are still floats."""
        band = {} if self.low is None else {"low": self.low, "high": self.high}
        return {
            "name": self.name,
            "unit": self.unit,
            "rank": self.rank,
            "attempt": self.attempt,
            "axis": self.axis,
            "x": self.x,
            "y": self.y,
            **band,
            "total_points": self.total_points,
            "last_seq": self.last_seq,
        }


def series(
    *,
    run: Run,
    name: str,
    rank: int | None = None,
    attempt: int | None = None,
    x: Axis = "step",
    points: int = 1500,
    from_: float | None = None,
    to: float | None = None,
    after_seq: int | None = None,
) -> SeriesAnswer:
    """A metric with at most `points` (1 to 5000) points, including every spike.

    `from_` and `to` are in the unit of axis `x`. Without `rank` there is one point per step: the
    newest attempt wins, then the lowest rank. Without points the lists are empty. Raises Refusal
    for FLOPs of a run that names no model.
    """
    per_token = run_flops_per_token(run) if x == "flops" else 1.0
    window = _window(x, from_, to, after_seq, per_token)
    ordered = sources(run.id, name, rank=rank, attempt=attempt)
    # a requested attempt is shown without later rewinds
    rewinds = run.rewinds if attempt is None else ()
    return _answer(run, name, ordered, window, rewinds, x, points, per_token, rank)


def series_of_runs(
    *, runs: Sequence[Run], name: str, x: Axis = "step", points: int = 1500
) -> dict[int, SeriesAnswer]:
    """`series` of each run's metric by the run's id, in few queries for any number of runs.

    For FLOPs, runs that name no model are left out.
    """
    ordered = sources_of_runs([run.id for run in runs], name)
    answers = {}
    for start in range(0, len(runs), _RUNS):  # so that few chunks are in memory at once
        part = runs[start : start + _RUNS]
        flat = [source for run in part for source in ordered[run.id]]
        read = iter(with_chunks(flat, most=_EXACT_CHUNKS))
        for run in part:
            own = [next(read) for _ in ordered[run.id]]
            try:
                per_token = run_flops_per_token(run) if x == "flops" else 1.0
            except Refusal:
                continue
            whole = _window(x, None, None, None, per_token)
            answers[run.id] = _answer(
                run, name, own, whole, run.rewinds, x, points, per_token, None
            )
    return answers


def _answer(
    run: Run,
    name: str,
    ordered: list[Source],
    window: Window,
    rewinds: Any,
    x: Axis,
    points: int,
    per_token: float,
    rank: int | None,
) -> SeriesAnswer:
    points = min(max(points, 1), MAX_POINTS)
    merged = merge(ordered, window, enough=max(_EXACT_CHUNKS, points // 2), rewinds=rewinds)
    places, y = _places(merged.points, x, per_token)
    reduced = reduce(places, y, points)
    integer_axis = x in ("step", "tokens")
    return SeriesAnswer(
        name=name,
        unit=run_metric_unit(name, run.spec),
        rank=rank if rank is not None else merged.rank,
        attempt=merged.attempt,
        axis=x,
        x=reduced.x.astype(np.int64).tolist() if integer_axis else reduced.x.tolist(),
        y=reduced.y.tolist(),
        low=None if reduced.low is None else reduced.low.tolist(),
        high=None if reduced.high is None else reduced.high.tolist(),
        total_points=merged.total,
        last_seq=merged.last_seq,
    )


def series_raw(
    *,
    run: Run,
    name: str,
    rank: int | None = None,
    attempt: int | None = None,
    from_: float | None = None,
    to: float | None = None,
    after_seq: int | None = None,
    x: Axis = "step",
) -> Iterator[tuple[int, int, int, int, int, float, float]]:
    """Every point `(attempt, rank, seq, step, tokens, time, value)`, oldest attempt first.

    Selects one point per step as `series` does. Reads chunk by chunk. In an attempt the lowest rank
    comes first, then the steps that only higher ranks have: in a live run the newest steps.
    """
    per_token = run_flops_per_token(run) if x == "flops" else 1.0
    window = _window(x, from_, to, after_seq, per_token)
    ordered = sources(run.id, name, rank=rank, attempt=attempt)
    if after_seq is not None:
        ordered = [source for source in ordered if source.attempt == ordered[0].attempt]
    covered = np.zeros(0, np.int64)
    steps_above = []
    for source in ordered:  # by descending precedence
        steps_above.append(covered)
        if source is not ordered[-1]:
            covered = np.union1d(
                covered, np.concatenate([curve.step for curve in iterate(source, Window())])
            )
    rewinds = run.rewinds if attempt is None else ()
    by_attempt = sorted(zip(ordered, steps_above, strict=True), key=lambda pair: pair[0].attempt)
    for source, above in by_attempt:  # a stable sort: ranks stay ascending
        for curve in iterate(source, replace(window, without=rewound_steps(source, rewinds))):
            own = curve.take(~np.isin(curve.step, above)) if len(above) else curve
            columns = (*own.axes.tolist(), own.time.tolist(), own.y.tolist())
            for row in zip(*columns, strict=True):
                yield (source.attempt, source.rank, *row)


def series_names(*, run: Run) -> list[str]:
    """Names of all metrics of the run, sorted."""
    writers = Cursor.objects.filter(run=run, stream="points").values_list("latest", flat=True)
    return sorted({name for latest in writers for name in json.loads(latest)})


def _window(
    x: Axis, from_: float | None, to: float | None, after_seq: int | None, per_token: float
) -> Window:
    axis = AXES.index("tokens" if x == "flops" else x)
    low = -math.inf if from_ is None else from_ / per_token
    high = math.inf if to is None else to / per_token
    return Window(axis=axis, low=low, high=high, after_seq=after_seq)


def _places(curve: Curve, x: Axis, per_token: float) -> tuple[Floats, Floats]:
    """Points sorted by their place on the axis: `(x, y)`."""
    if x == "step":
        return curve.step.astype(np.float64), curve.y
    if x == "time":
        return _monotonic(curve.time), curve.y
    places = curve.axes[2] * per_token
    if len(places) > 1 and not np.all(places[1:] >= places[:-1]):
        order = np.argsort(places, kind="stable")
        return places[order], curve.y[order]
    return places, curve.y


def _monotonic(time: Floats) -> Floats:
    """Times that do not decrease from step to step, although a clock may have gone backwards.

    Points around the jump move to its end or its start, whichever moves fewer points.
    """
    if len(time) < 2 or np.all(time[1:] >= time[:-1]):
        return time
    later = np.maximum.accumulate(time)
    earlier = np.minimum.accumulate(time[::-1])[::-1]
    return later if np.sum(later != time) <= np.sum(earlier != time) else earlier


def run_flops_per_token(run: Run) -> float:
    """Model FLOPs per token of this run. Raises Refusal if the spec names no model."""
    spec = RunSpec.from_dict(run.spec)
    shape = spec.shape if "model" in run.spec else None
    if (
        spec.kind == "train"
        and spec.train is not None
        and (shape := spec.trained_shape) is not None
    ):
        return training_flops_per_token(shape, spec.train)
    if shape is not None:
        return flops_per_token(shape, shape.max_seq_len)
    raise invalid("x", "the axis flops requires a model; this run's spec names none", "Use tokens.")
