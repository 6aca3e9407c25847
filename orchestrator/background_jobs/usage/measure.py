"""Measures the usage of days from device allocations and stores it, one row per person and pool.

A day is a UTC day. `device_s` is the time for which devices were held within it; productive and
lost time of an ended attempt are spread evenly over the time for which it held devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from django.db import transaction

from orchestrator.accounts import selectors as accounts
from orchestrator.background_jobs.models import UsageDay
from orchestrator.device_history import selectors as history
from orchestrator.scheduling.accounting import held as devices

BACK_DAYS: Final = 31  # before the first run of the job
AGAIN_DAYS: Final = 2  # a day is measured again for this long: late accounts of attempts


@dataclass(slots=True)
class _Sum:
    device_s: float = 0.0
    productive_s: float = 0.0
    lost_s: float = 0.0
    energy_j: float = 0.0
    attempts: set[int] = field(default_factory=set)


def measure_due(*, now: datetime, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Measure today, days that are not final, and missing days; returns the number of rows.

    May run again at any time: a day's rows are replaced.
    """
    today = now.astimezone(UTC).date()
    stored = set(UsageDay.objects.filter(final=True).values_list("day", flat=True).distinct())
    first = max(today - timedelta(days=BACK_DAYS), devices.first_allocation(today))
    rows = 0
    day = first
    while day <= today:
        if day not in stored:
            rows += len(day_store(day, now=now, dry_run=dry_run))
            renew()
        day += timedelta(days=1)
    return {"usage_rows": rows}


def day_store(day: date, *, now: datetime, dry_run: bool = False) -> list[UsageDay]:
    """Replace the rows of a day; a day without usage gets one row of zeros once it is final."""
    start = datetime.combine(day, time.min, UTC)
    end = start + timedelta(days=1)
    sums: dict[tuple[int, str, str], _Sum] = defaultdict(_Sum)
    energy = history.energy_of_attempts(since=start, until=end)
    for held in devices.held_devices(since=start, until=min(end, now)):
        row = sums[held.owner, held.username, held.pool]
        row.device_s += held.seconds
        row.productive_s += held.seconds * held.productive
        row.lost_s += held.seconds * held.lost
        row.energy_j += energy.pop(held.attempt, 0.0)
        row.attempts.add(held.attempt)
    final = now >= end + timedelta(days=AGAIN_DAYS)
    teams = accounts.team_names({owner for owner, _, _ in sums})
    rows = [
        UsageDay(
            day=day,
            owner=owner,
            person=username,
            teams=teams.get(owner, []),
            pool=pool,
            device_s=row.device_s,
            productive_s=row.productive_s,
            lost_s=row.lost_s,
            attempts=len(row.attempts),
            energy_j=row.energy_j,
            final=final,
        )
        for (owner, username, pool), row in sorted(sums.items())
    ]
    if final and not rows:
        rows = [UsageDay(day=day, owner=0, final=True)]
    if not dry_run:
        with transaction.atomic():
            UsageDay.objects.filter(day=day).delete()
            UsageDay.objects.bulk_create(rows, batch_size=500)
    return rows
