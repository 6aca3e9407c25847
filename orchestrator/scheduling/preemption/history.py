"""Reads recent preemptions: which run, when, why, for which run, and the work that was lost."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run, RunEvent
from orchestrator.scheduling.models import DeviceTime
from workers.contracts.exit_classes import ExitClass

RECENT: Final = timedelta(days=7)


@dataclass(frozen=True)
class PreemptionRow:
    """A preempted attempt; `lost_s` are the device-seconds whose steps it repeats later."""

    run: Run
    time: datetime
    reason: str
    by: int | None  # the run that got the devices; None: maintenance or a reservation
    lost_s: float


def recent(*, user: User, limit: int) -> list[PreemptionRow]:
    """The newest preemptions of the last 7 days, of runs that the user may see."""
    rows = DeviceTime.objects.filter(
        ended__gte=clock.now() - RECENT,
        attempt__exit_class=ExitClass.PREEMPTED,
        attempt__run__in=runs.runs_visible_to(user=user).values("pk"),
    )
    newest = list(rows.select_related("attempt__run__owner").order_by("-ended")[: 4 * limit])
    events = RunEvent.objects.filter(
        run__in={row.attempt.run_id for row in newest}, type__in=("preempted", "resize_requested")
    ).values_list("run_id", "attempt", "data")
    causes = {
        (run, attempt): data
        for run, attempt, data in events
        if data.get("reason") and data.get("cause") != "free_devices"
    }
    rows_shown = []
    for row in newest:  # a pause by a user ends an attempt in the same way, without a cause
        data = causes.get((row.attempt.run_id, row.attempt.number))
        if data is not None:
            by = data.get("by")
            rows_shown.append(
                PreemptionRow(
                    row.attempt.run,
                    row.ended,
                    str(data["reason"]),
                    by if isinstance(by, int) else None,
                    row.preemption,
                )
            )
    return rows_shown[:limit]
