"""How long attempts of runs held devices and ran, and when a running one made its last step.

Waits and pauses do not count as time.

The one definition for pages. `ledger` splits the same device time of
ended attempts by cause.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final, NamedTuple

from orchestrator.common import clock
from orchestrator.runs.models import Attempt

_WAIT_FOR_REQUESTS: Final = frozenset(("serve", "generate", "evaluate", "produce"))


class RunTime(NamedTuple):
    """`device_s`: seconds of all attempts, times devices; `ran_s`: seconds since ranks started."""

    device_s: float = 0.0
    ran_s: float = 0.0
    started: datetime | None = None  # of the newest attempt whose ranks started

    @property
    def device_hours(self) -> float:
        """Device time in hours."""
        return self.device_s / 3600


def run_times(run_ids: Collection[int], *, now: datetime | None = None) -> dict[int, RunTime]:
    """`{run: RunTime}` of the runs that had an attempt; one query.

    An attempt holds its devices from its creation to its end; in another engine from the start of
    its job.
    """
    now = now or clock.now()
    times: dict[int, RunTime] = {}
    rows = Attempt.objects.filter(run_id__in=run_ids).only(
        "run_id", "placement", "created", "launched", "started", "ended"
    )
    for attempt in rows:
        devices = sum(len(share["devices"]) for share in attempt.placement)
        end = attempt.ended or now
        held_s = max(0.0, (end - (attempt.held_from or end)).total_seconds())
        ran_s = max(0.0, (end - attempt.started).total_seconds()) if attempt.started else 0.0
        before = times.get(attempt.run_id, RunTime())
        started = max(filter(None, (before.started, attempt.started)), default=None)
        times[attempt.run_id] = RunTime(
            before.device_s + devices * held_s, before.ran_s + ran_s, started
        )
    return times


def last_step(kind: str, newest_point: Any, started: datetime | None) -> float | None:
    """Unix seconds of a running attempt's last step, from which its silence is judged.

    None for kinds that wait for requests, and before the attempt's first point: a point of an
    earlier attempt has no meaning for this one, which may still read its checkpoint.
    """
    if kind in _WAIT_FOR_REQUESTS or not isinstance(newest_point, int | float):
        return None
    if started is not None and newest_point < started.timestamp():
        return None
    return float(newest_point)
