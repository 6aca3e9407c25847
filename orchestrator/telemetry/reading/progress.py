"""When an attempt made progress: its first and its last logged step.

Does not check permissions; callers do.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from orchestrator.runs.models import Run
from orchestrator.telemetry.models import Cursor
from orchestrator.telemetry.reading.levels import Window, iterate, sources

_STEP_TIME: Final = "step_time_s"
_LONGEST_STEP_S: Final = 86_400.0


class Progress(NamedTuple):
    """Unix seconds by the ranks' clocks: start of the first logged step, end of the last one."""

    first: float
    last: float


def progress(*, run: Run, attempt: int) -> Progress | None:
    """The progress of an attempt; None if no rank logged a point."""
    cursors = Cursor.objects.filter(run=run, attempt=attempt, stream="points", rank__gte=0)
    rows = list(cursors.order_by("rank").values_list("last_time", "latest"))
    if not rows:
        return None
    last = max(time for time, _ in rows)
    names = {name for _, latest in rows for name in json.loads(latest)}
    if not names:
        return None
    first = _first(run, attempt, _STEP_TIME if _STEP_TIME in names else min(names))
    return Progress(min(first, last) if first is not None else last, last)


def _first(run: Run, attempt: int, name: str) -> float | None:
    """The time of the metric's first point, less its step time if that is the metric."""
    for source in sources(run.pk, name, rank=None, attempt=attempt):
        for curve in iterate(source, Window()):
            if len(curve.time):
                duration = float(curve.y[0]) if name == _STEP_TIME else 0.0
                return float(curve.time[0]) - (duration if 0 < duration < _LONGEST_STEP_S else 0.0)
    return None
