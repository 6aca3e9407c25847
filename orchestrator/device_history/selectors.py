"""Reads the history of nodes, devices and pools, idle devices, and the energy of attempts.

Every active user sees the readings of nodes, as on the Fleet page. What attempts used is limited
by the caller to the people whose runs a user sees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
from django.db.models import QuerySet, Sum

from orchestrator.common import clock
from orchestrator.common.errors import invalid
from orchestrator.device_history.models import (
    AttemptHour,
    NodeReadings,
    PoolReadings,
)
from orchestrator.device_history.packing import Chunk, Floats, empty, summarize, unpack
from orchestrator.device_history.packing import with_devices as with_indexes
from orchestrator.device_history.series import (
    DAY_S,
    MEAN,
    MINUTE_S,
    NODE,
    POOL,
    QUARTER_S,
    ROW_S,
)
from orchestrator.fleet.models import Node

FINE_S: Final = 86_400.0  # longer periods are read from quarter hours
MOST_POINTS: Final = 2000
_STEPS_S: Final = (
    *(60 * minutes for minutes in (1, 2, 3, 4, 5, 6, 10, 15, 20, 30)),
    *(3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12, 24)),
)
MOST_SPAN: Final = timedelta(days=400)


@dataclass(frozen=True)
class Period:
    """Equal columns of time: column i begins at `start + i * step_s`, in Unix seconds."""

    start: int
    step_s: int
    columns: int
    stored_s: int  # the step of the stored points

    @property
    def end(self) -> int:
        """The end of the last column."""
        return self.start + self.columns * self.step_s

    @property
    def times(self) -> list[int]:
        """The start of each column."""
        return [self.start + at * self.step_s for at in range(self.columns)]


def period(*, until: datetime, seconds: float, points: int) -> Period:
    """The columns of the last `seconds` before `until`, at most `points`; the last is not full."""
    stored = MINUTE_S if seconds <= FINE_S else QUARTER_S
    least = seconds / max(1, min(points, MOST_POINTS))
    nice = (step for step in _STEPS_S if step >= least and step % stored == 0)
    step = next(nice, 0) or -(-int(least) // DAY_S) * DAY_S
    end = (int(until.timestamp()) // step + 1) * step
    columns = max(1, -(-int(seconds) // step))
    return Period(end - columns * step, step, columns, stored)


def period_between(*, since: datetime | None, until: datetime | None, points: int) -> Period:
    """The columns from `since` to `until`; by default of the last 24 hours.

    Raises Refusal 422 if the times are in the wrong order or more than 400 days apart.
    """
    end = until or clock.now()
    start = since or end - timedelta(days=1)
    if start >= end:
        raise invalid("from", f"{start:%Y-%m-%d %H:%M} is not before `to`", "Use an earlier time.")
    if end - start > MOST_SPAN:
        raise invalid("from", f"a period has at most {MOST_SPAN.days} days", "Use a later time.")
    return period(until=end, seconds=(end - start).total_seconds(), points=points)


def node_history(*, node: Node, over: Period) -> Chunk:
    """The node's readings, one point per column of the period."""
    rows = NodeReadings.objects.filter(node=node)
    return _read(rows, over, len(NODE))


def fleet_history(*, over: Period, pools: Collection[str] | None = None) -> dict[str, Floats]:
    """Sums over the pools by metric, each [S, T]; NaN in columns without a heartbeat."""
    rows = PoolReadings.objects.all()
    if pools is not None:
        rows = rows.filter(pool__in=pools)
    names = sorted(set(rows.order_by().values_list("pool", flat=True).distinct()))
    total = np.full((len(POOL), 3, over.columns), np.nan, np.float32)
    for name in names:
        one = _read(rows.filter(pool=name), over, len(POOL)).other
        total = np.where(np.isnan(total), one, total + np.nan_to_num(one))
    return {name: total[at] for at, name in enumerate(POOL)}


def pool_names() -> list[str]:
    """Pools with readings, by name."""
    rows = PoolReadings.objects.order_by("pool").values_list("pool", flat=True)
    return list(rows.distinct())


@dataclass(frozen=True)
class Use:
    """Sums over devices: seconds with readings, idle and measured ones, and joules."""

    read_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0
    measured_s: float = 0.0
    energy_j: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(
            self.read_s + other.read_s,
            self.idle_s + other.idle_s,
            self.busy_s + other.busy_s,
            self.measured_s + other.measured_s,
            self.energy_j + other.energy_j,
        )


class RunUse(NamedTuple):
    """What the attempts of a run used; the run's names."""

    run: int
    name: str
    owner: int
    username: str
    experiment: str
    use: Use


def use_of_runs(
    *, since: datetime, until: datetime, owners: Collection[int] | None = None
) -> list[RunUse]:
    """Use of the hours that begin in the period, by run; of these owners' runs, if given."""
    rows = _hours(since, until)
    if owners is not None:
        rows = rows.filter(attempt__run__owner__in=owners)
    names = (
        "attempt__run_id",
        "attempt__run__name",
        "attempt__run__owner_id",
        "attempt__run__owner__username",
        "attempt__run__experiment__name",
    )
    grouped = rows.order_by().values_list(*names).annotate(*_sums())
    return [
        RunUse(run, name, owner, username, experiment or "", Use(*values))
        for run, name, owner, username, experiment, *values in grouped
    ]


def energy_of_attempts(*, since: datetime, until: datetime) -> dict[int, float]:
    """Joules of the hours that begin in the period by attempt, where power was measured."""
    rows = _hours(since, until).filter(measured_s__gt=0).order_by()
    return dict(rows.values_list("attempt_id").annotate(Sum("energy_j")))


def _hours(since: datetime, until: datetime) -> QuerySet[AttemptHour]:
    return AttemptHour.objects.filter(
        hour__gte=int(since.timestamp()) // 3600 * 3600, hour__lt=until.timestamp()
    )


def _sums() -> list[Any]:
    return [Sum(name) for name in ("read_s", "idle_s", "busy_s", "measured_s", "energy_j")]


def _read(rows: QuerySet[Any], over: Period, metrics: int) -> Chunk:
    """The rows' points in the period's columns."""
    chunks = _chunks(rows, over)
    indexes = sorted({index for _, _, chunk in chunks for index in chunk.indexes})
    number = over.columns * over.step_s // over.stored_s
    whole = empty(number, indexes=indexes, other=metrics)
    for start, step, chunk in chunks:
        if step < over.stored_s:
            chunk = Chunk(chunk.indexes, summarize(chunk.devices), summarize(chunk.other))
            start = start // over.stored_s * over.stored_s
        chunk = with_indexes(chunk, indexes)
        first = (start - over.start) // over.stored_s
        a, b = max(0, first), min(number, first + chunk.points)
        if a >= b:
            continue
        part = slice(a - first, b - first)
        whole.devices[..., a:b] = _merged(whole.devices[..., a:b], chunk.devices[..., part])
        whole.other[..., a:b] = _merged(whole.other[..., a:b], chunk.other[..., part])
    counts = [over.step_s // over.stored_s] * over.columns
    if counts[0] == 1:
        return whole
    return Chunk(whole.indexes, summarize(whole.devices, counts), summarize(whole.other, counts))


def _merged(have: Floats, new: Floats) -> Floats:
    return np.where(np.isnan(have), new, have)


def _chunks(rows: QuerySet[Any], over: Period) -> list[tuple[int, int, Chunk]]:
    """`(start, step, chunk)` of the rows within the period, and of minutes not summarized yet."""
    reach = ROW_S[over.stored_s]
    within = rows.filter(
        step_s=over.stored_s, start__gt=over.start - reach, start__lt=over.end
    ).order_by("start")
    values: Iterable[Any] = within.values_list("start", "step_s", "data")
    chunks = [(start, step, unpack(data)) for start, step, data in values]
    if over.stored_s != MINUTE_S:
        newest = rows.filter(step_s=MINUTE_S, open=True, start__lt=over.end)
        values = newest.values_list("start", "step_s", "data")
        chunks += [(start, step, unpack(data)) for start, step, data in values]
    return chunks


def mean_of(values: Floats) -> list[float | None]:
    """The means of a metric's points [S, T]; None without reading."""
    return plain(values[MEAN])


def plain(values: Any) -> list[float | None]:
    """Numbers for JSON; None for NaN."""
    return [None if value != value else float(f"{value:.5g}") for value in values.tolist()]


def time_of(seconds: int) -> datetime:
    """The time of Unix seconds."""
    return clock.from_unix(seconds)
