"""Keeps the metric summaries of runs current: marks runs with new points, computes them later.

A mark is written with the points, so no crash loses it. A summary is computed outside of the
transaction that stores points, at most every few seconds per run.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from django.db import transaction
from django.db.models import Q

from orchestrator.common import clock
from orchestrator.runs.models import Run
from orchestrator.telemetry.models import MetricName, MetricSummary, StaleSummary
from orchestrator.telemetry.reading.totals import metric_totals

DELAY: Final = timedelta(seconds=3)  # from the first new point to its summary
_ABANDONED: Final = timedelta(seconds=60)  # a computation that took longer has failed
_NUMBERS: Final = ("last", "min", "max", "mean", "median", "points")


def mark_stale(run_ids: Iterable[int]) -> None:
    """Record that these runs have new points; inside the transaction that stores them."""
    now = clock.now()
    rows = [StaleSummary(run_id=id, since=now) for id in sorted(set(run_ids))]
    StaleSummary.objects.bulk_create(
        rows, update_conflicts=True, unique_fields=["run"], update_fields=["taken"]
    )


def refresh(*, limit: int = 1, wait: bool = True) -> int:
    """Compute the summaries of the runs that wait longest; returns their number.

    `wait`: only of runs whose first new point is older than `DELAY`.
    """
    now = clock.now()
    due = StaleSummary.objects.filter(Q(taken=None) | Q(taken__lt=now - _ABANDONED))
    if wait:
        due = due.filter(since__lte=now - DELAY)
    done = 0
    for row in due.select_related("run").order_by("since")[:limit]:
        mine = StaleSummary.objects.filter(pk=row.pk, taken=row.taken)
        if mine.update(taken=now):
            summarize(row.run)
            # points that came meanwhile cleared `taken`: they are computed the next time
            StaleSummary.objects.filter(pk=row.pk, taken=now).delete()
            StaleSummary.objects.filter(pk=row.pk).update(since=clock.now())
            done += 1
    return done


def summarize(run: Run) -> None:
    """Write the metric summaries of one run."""
    totals = metric_totals(run=run)
    if not totals:
        return
    rows = [
        MetricSummary(
            run_id=run.pk,
            name=name,
            last=item.last,
            min=item.min,
            max=item.max,
            mean=item.mean,
            median=item.median,
            points=item.points,
        )
        for name, item in totals.items()
    ]
    with transaction.atomic():
        if not Run.objects.filter(pk=run.pk).exists():
            return
        MetricSummary.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["run", "name"],
            update_fields=list(_NUMBERS),
        )
        names = [MetricName(owner_id=run.owner_id, name=name) for name in totals]
        MetricName.objects.bulk_create(names, ignore_conflicts=True)
