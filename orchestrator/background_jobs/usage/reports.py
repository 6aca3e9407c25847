"""Reads usage reports: sums by team, person, pool, experiment, day or month, as a user may see.

Those by experiment are measured when they are read; the others add stored days (`measure`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, NamedTuple

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import UsageDay
from orchestrator.background_jobs.usage import electricity
from orchestrator.common import clock
from orchestrator.common.errors import invalid
from orchestrator.common.units import csv_text, day_of
from orchestrator.device_history import selectors as history
from orchestrator.fleet import selectors as fleet
from orchestrator.scheduling.accounting.held import experiments_of, held_devices
from workers.contracts.catalog.devices import DEVICES

GROUPS: Final = ("team", "person", "pool", "experiment", "day", "month")
BY_TIME: Final = ("day", "month")
_VALUES: Final = 6
MOST_DAYS: Final = 400
DEFAULT_DAYS: Final = 30


@dataclass(frozen=True)
class Row:
    """Usage of one group, in device-seconds, and its cost at the catalogue's typical prices.

    `energy_j` is of devices whose power was measured; `month` (2026-01) only in reports per month.
    """

    key: str
    device_s: float
    productive_s: float
    lost_s: float
    attempts: int
    cost_usd: float = 0.0
    energy_j: float = 0.0
    month: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Data of the REST response."""
        return {
            "key": self.key,
            "device_s": round(self.device_s, 3),
            "productive_s": round(self.productive_s, 3),
            "lost_s": round(self.lost_s, 3),
            "attempts": self.attempts,
            "cost_usd": round(self.cost_usd, 4),
            "energy_kwh": electricity.site_kwh(self.energy_j),
            "co2_kg": electricity.co2_kg(self.energy_j),
            "month": self.month,
        }


@dataclass(frozen=True)
class Report:
    """The rows, largest usage first (days by date), and the sum over all that the user may see.

    The rows of teams may add up to more: a person in several teams counts for each of them.
    """

    since: date
    until: date  # included
    by: str
    rows: list[Row]
    total: Row
    final: bool  # false while today or late accounts may still change it


def period(since: str, until: str) -> tuple[date, date]:
    """Both days, included; by default the last 30. Raises Refusal 422."""
    today = clock.now().astimezone(UTC).date()
    last = _day("to", until) if until else today
    first = _day("from", since) if since else last - timedelta(days=DEFAULT_DAYS - 1)
    if first > last:
        raise invalid("from", f"{first} is after {last}", "Use an earlier day.")
    if (last - first).days >= MOST_DAYS:
        raise invalid("from", f"a report covers at most {MOST_DAYS} days", "Use a later day.")
    return first, last


def report(
    *,
    user: User,
    since: date,
    until: date,
    by: str = "team",
    own: bool = False,
    monthly: bool = False,
) -> Report:
    """Usage of the days `since` to `until`, of the people whose runs the user may see.

    `own`: only the user's. `monthly`: one row per group and month. Raises Refusal 422 for an
    unknown group.
    """
    if by not in GROUPS:
        raise invalid("by", f"{by!r} is not a group", f"Use one of {', '.join(GROUPS)}.")
    owners = [user.pk] if own else accounts.visible_owners(user)
    if by == "experiment":
        parts, final = _of_experiments(since, until, owners)
    else:
        parts, final = _of_days(since, until, owners, by)
    sums: dict[tuple[str, str], list[float]] = {}
    total = [0.0] * _VALUES
    for part in parts:
        total = [have + value for have, value in zip(total, part.values, strict=True)]
        for name in part.keys:
            key = part.month if monthly else "", name
            have = sums.get(key, [0.0] * _VALUES)
            sums[key] = [one + value for one, value in zip(have, part.values, strict=True)]
    rows = [_row(name, values, month) for (month, name), values in sums.items()]
    if by in BY_TIME:
        rows.sort(key=lambda row: row.key)
    else:
        rows.sort(key=lambda row: (row.month, -row.device_s, row.key))
    return Report(since, until, by, rows, _row("", total), final)


class _Part(NamedTuple):
    """One summand: the groups it counts for, and the numbers of a row."""

    keys: list[str]
    month: str
    values: tuple[float, float, float, float, float, float]


def _of_days(
    since: date, until: date, owners: Collection[int] | None, by: str
) -> tuple[list[_Part], bool]:
    days = UsageDay.objects.filter(day__gte=since, day__lte=until)
    if owners is not None:
        days = days.filter(owner__in=owners)
    prices, parts, final = prices_by_pool(), [], True
    for row in days.iterator():
        final = final and row.final
        cost = row.device_s / 3600 * prices.get(row.pool, 0.0)
        values = (
            row.device_s,
            row.productive_s,
            row.lost_s,
            float(row.attempts),
            cost,
            row.energy_j,
        )
        keys = _keys(row, by) if row.owner else []
        parts.append(_Part(keys, row.day.isoformat()[:7], values))
    return parts, final


def _of_experiments(
    since: date, until: date, owners: Collection[int] | None
) -> tuple[list[_Part], bool]:
    now, prices, parts = clock.now(), prices_by_pool(), []
    start = since
    while start <= until:  # month by month
        following = (start.replace(day=1) + timedelta(days=32)).replace(day=1)
        end = min(following, until + timedelta(days=1))
        first, last = (datetime.combine(day, time.min, UTC) for day in (start, end))
        by_attempt: dict[int, list[float]] = {}
        energy = history.energy_of_attempts(since=first, until=min(last, now))
        for each in held_devices(since=first, until=min(last, now), owners=owners):
            seconds = each.seconds
            sums = by_attempt.setdefault(each.attempt, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
            sums[0] += seconds
            sums[1] += seconds * each.productive
            sums[2] += seconds * each.lost
            sums[4] += seconds / 3600 * prices.get(each.pool, 0.0)
            sums[5] += energy.pop(each.attempt, 0.0)
        names = experiments_of(by_attempt)
        by_name: dict[str, list[float]] = {}
        for attempt, sums in by_attempt.items():
            name = names.get(attempt, "")
            have = by_name.get(name, [0.0] * _VALUES)
            by_name[name] = [one + value for one, value in zip(have, sums, strict=True)]
        for name, (held_s, productive, lost, attempts, cost, joules) in by_name.items():
            values = (held_s, productive, lost, attempts, cost, joules)
            parts.append(_Part([name], start.isoformat()[:7], values))
        start = following
    return parts, until < now.astimezone(UTC).date()


def prices_by_pool() -> dict[str, float]:
    """US dollars per device-hour of each pool: the mean of its devices' typical prices."""
    sums: dict[str, list[float]] = {}
    for pool, name, count in fleet.catalogue_counts():
        entry = DEVICES.get(name)
        if entry is not None:
            have = sums.setdefault(pool, [0.0, 0.0])
            have[0] += count * entry.usd_per_hour
            have[1] += count
    return {pool: usd / count for pool, (usd, count) in sums.items()}


def report_csv(result: Report) -> str:
    """The report as CSV with a header line; texts are safe in spreadsheets."""
    out = io.StringIO()
    writer = csv.writer(out)
    numbers = ["device_s", "productive_s", "lost_s", "attempts", "cost_usd"]
    numbers += ["energy_kwh", "co2_kg"]
    monthly = any(row.month for row in result.rows)
    writer.writerow([*(["month"] if monthly else []), result.by, *numbers])
    for row in result.rows:
        values = row.to_dict()
        writer.writerow(
            [
                *([row.month] if monthly else []),
                csv_text(row.key),
                *[values[name] for name in numbers],
            ]
        )
    return out.getvalue()


def _keys(row: UsageDay, by: str) -> list[str]:
    if by == "team":
        return list(row.teams) or [""]
    return [
        {
            "person": row.person,
            "pool": row.pool,
            "day": row.day.isoformat(),
            "month": row.day.isoformat()[:7],
        }[by]
    ]


def _row(key: str, values: list[float], month: str = "") -> Row:
    held_s, productive, lost, attempts, cost, joules = values
    return Row(key, held_s, productive, lost, int(attempts), cost, joules, month)


def _day(field: str, text: str) -> date:
    try:
        return day_of(text)
    except ValueError:
        raise invalid(
            field, f"{text[:20]!r} is not a day", "Use a day such as 2026-01-31."
        ) from None
