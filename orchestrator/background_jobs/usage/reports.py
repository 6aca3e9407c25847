"""Reads usage reports: sums of stored days by team, person, pool or day, as far as a user may see.

Does not measure (`measure`).
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, date, timedelta
from typing import Any, Final

from orchestrator.accounts import selectors as accounts
from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import UsageDay
from orchestrator.common import clock
from orchestrator.common.errors import invalid
from orchestrator.common.units import csv_text

GROUPS: Final = ("team", "person", "pool", "day")
MOST_DAYS: Final = 400
DEFAULT_DAYS: Final = 30


@dataclass(frozen=True)
class Row:
    """Usage of one team, person, pool or day, in device-seconds."""

    key: str
    device_s: float
    productive_s: float
    lost_s: float
    attempts: int

    def to_dict(self) -> dict[str, Any]:
        """Data of the REST response."""
        return {
            "key": self.key,
            "device_s": round(self.device_s, 3),
            "productive_s": round(self.productive_s, 3),
            "lost_s": round(self.lost_s, 3),
            "attempts": self.attempts,
        }


@dataclass(frozen=True)
class Report:
    """The rows by falling usage (days by date), and the sum over all that the user may see.

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
        raise invalid("from", f"{first} is after {last}", "an earlier day")
    if (last - first).days >= MOST_DAYS:
        raise invalid("from", f"a report covers at most {MOST_DAYS} days", "a later day")
    return first, last


def report(*, user: User, since: date, until: date, by: str = "team", own: bool = False) -> Report:
    """Usage of the days `since` to `until`, of the people whose runs the user may see.

    `own`: only the user's. Raises Refusal 422 for an unknown group.
    """
    if by not in GROUPS:
        raise invalid("by", f"{by!r} is not a group", ", ".join(GROUPS))
    days = UsageDay.objects.filter(day__gte=since, day__lte=until)
    owners = [user.pk] if own else accounts.visible_owners(user)
    if owners is not None:
        days = days.filter(owner__in=owners)
    sums: dict[str, list[float]] = {}
    total, final = [0.0, 0.0, 0.0, 0.0], True
    for row in days.iterator():
        values = (row.device_s, row.productive_s, row.lost_s, float(row.attempts))
        final = final and row.final
        total = [have + value for have, value in zip(total, values, strict=True)]
        for key in _keys(row, by) if row.owner else []:
            have = sums.get(key, [0.0] * 4)
            sums[key] = [one + value for one, value in zip(have, values, strict=True)]
    rows = [_row(key, values) for key, values in sums.items()]
    rows.sort(key=(lambda row: row.key) if by == "day" else (lambda row: (-row.device_s, row.key)))
    return Report(since, until, by, rows, _row("", total), final)


def report_csv(result: Report) -> str:
    """The report as CSV with a header line; texts are safe in spreadsheets."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([result.by, "device_s", "productive_s", "lost_s", "attempts"])
    for row in result.rows:
        values = row.to_dict()
        writer.writerow([csv_text(row.key), *[values[name] for name in list(values)[1:]]])
    return out.getvalue()


def _keys(row: UsageDay, by: str) -> list[str]:
    if by == "team":
        return list(row.teams) or [""]
    return [{"person": row.person, "pool": row.pool, "day": row.day.isoformat()}[by]]


def _row(key: str, values: list[float]) -> Row:
    return Row(key, values[0], values[1], values[2], int(values[3]))


def _day(field: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise invalid(field, f"{text[:20]!r} is not a day", "2026-01-31") from None
