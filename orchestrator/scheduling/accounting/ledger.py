"""Stores the device time of ended attempts, and reads it: per attempt, per run, in total.

Points may arrive after an exit, so an account is computed again until it is final. Does not
define the figures (`split`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import QuerySet, Sum

from orchestrator.common.compiled_query import CompiledQuery
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.accounting import recorded
from orchestrator.scheduling.accounting.split import CAUSES, split
from orchestrator.scheduling.models import DeviceTime
from workers.contracts.wire.node_messages import AttemptState

log = logging.getLogger(__name__)

FIRST_AFTER_S: Final = 2.0  # after the end; the last points of a running ingest have arrived
FINAL_AFTER_S: Final = 900.0  # after the end; those of an ingest that was down for 10 minutes
_PER_PASS: Final = 100


@dataclass(frozen=True)
class Total:
    """Device-seconds of ended attempts; `lost` has every cause."""

    attempts: int = 0
    allocated: float = 0.0
    productive: float = 0.0
    queued: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    final: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Data of the REST response."""
        return {
            "allocated_s": round(self.allocated, 3),
            "productive_s": round(self.productive, 3),
            "lost_s": {cause: round(seconds, 3) for cause, seconds in self.lost.items()},
            "queued_s": round(self.queued, 3),
            "final": self.final,
        }


def settle(*, now: datetime) -> int:
    """Account attempts that have ended, and again when late points can no longer arrive.

    Returns the number of attempts. At most 100 of each per call.
    """
    ended = Attempt.objects.filter(state=AttemptState.EXITED).exclude(run__kind="external")
    ended = ended.select_related("run")
    fresh = ended.filter(device_time=None, ended__lte=now - timedelta(seconds=FIRST_AFTER_S))
    final = now - timedelta(seconds=FINAL_AFTER_S)
    due = ended.filter(device_time__final=False, ended__lte=final)
    chosen = [*fresh.order_by("id")[:_PER_PASS], *due.order_by("id")[:_PER_PASS]]
    for attempt in chosen:
        try:
            _account(attempt, final=attempt.ended is not None and attempt.ended <= final)
            _revise_earlier(attempt, final)
        except (KeyError, TypeError, ValueError):
            log.exception("Attempt %s could not be accounted", attempt)
            DeviceTime.objects.update_or_create(
                attempt=attempt, defaults={"ended": attempt.ended or now, "final": True}
            )
    return len(chosen)


_attempts_of_run = CompiledQuery(
    lambda run: Attempt.objects.filter(run=run).select_related("device_time").order_by("-number"),
    int,
)


def of_run(run: Run) -> tuple[Total | None, list[tuple[Attempt, Total | None]]]:
    """The sum over the run's accounted attempts, and all attempts with theirs, newest first.

    None where no attempt is accounted yet. One query.
    """
    attempts = _attempts_of_run.rows(run.pk)
    rows = {one.pk: one.device_time for one in attempts if hasattr(one, "device_time")}
    each = [(one, _total([rows[one.pk]]) if one.pk in rows else None) for one in attempts]
    return (_total(list(rows.values())) if rows else None), each


def total(*, since: datetime | None = None, final: bool = False) -> Total:
    """The sum over all attempts that ended at or after `since`; `final` omits other accounts."""
    rows: QuerySet[DeviceTime] = DeviceTime.objects.all()
    rows = rows if since is None else rows.filter(ended__gte=since)
    rows = rows.filter(final=True) if final else rows
    names = ("allocated", "productive", "queued", *CAUSES)
    sums = rows.aggregate(**{name: Sum(name) for name in names})
    return Total(
        attempts=rows.count(),
        allocated=sums["allocated"] or 0.0,
        productive=sums["productive"] or 0.0,
        queued=sums["queued"] or 0.0,
        lost={cause: sums[cause] or 0.0 for cause in CAUSES},
    )


def _total(rows: list[DeviceTime]) -> Total:
    return Total(
        attempts=len(rows),
        allocated=sum(row.allocated for row in rows),
        productive=sum(row.productive for row in rows),
        queued=sum(row.queued for row in rows),
        lost={cause: sum(float(getattr(row, cause)) for row in rows) for cause in CAUSES},
        final=all(row.final for row in rows),
    )


def _account(attempt: Attempt, *, final: bool) -> None:
    result = split(recorded.read(attempt))
    values = {
        "allocated": result.allocated,
        "productive": result.productive,
        "queued": result.queued,
        "ended": attempt.ended,
        "final": final,
        **result.lost,
    }
    DeviceTime.objects.update_or_create(attempt=attempt, defaults=values)


def _revise_earlier(attempt: Attempt, final: datetime) -> None:
    """Account earlier attempts again whose steps this attempt repeated."""
    step = recorded.resume_step(attempt)
    earlier = Attempt.objects.filter(run_id=attempt.run_id, number__lt=attempt.number)
    for one in earlier.filter(state=AttemptState.EXITED).select_related("run").order_by("-number"):
        _account(one, final=one.ended is not None and one.ended <= final)
        if recorded.resume_step(one) <= step:
            return
