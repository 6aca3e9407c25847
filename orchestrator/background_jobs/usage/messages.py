"""The weekly and monthly usage reports as messages of subscriptions, one per subscription.

A message is created once the period's last day has ended for two hours, and within three days.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from orchestrator.background_jobs.models import Delivery, Subscription
from orchestrator.background_jobs.usage import reports
from orchestrator.common.units import iso

EVENTS: Final = ("usage_weekly", "usage_monthly")
_AFTER: Final = timedelta(hours=2)
_WITHIN: Final = timedelta(days=3)
_SHOWN: Final = 5


def deliveries(subscriptions: Iterable[Subscription], *, now: datetime) -> list[Delivery]:
    """Unsaved deliveries of the periods that have just ended, without those that are stored."""
    periods = {f"{period[0]}:{period[2].isoformat()}": period for period in _ended(now)}
    if not periods:
        return []
    stored = Delivery.objects.filter(key__in=periods).values_list("subscription_id", "key")
    known, rows = set(stored), []
    for key, (event, since, until) in periods.items():
        end = datetime.combine(until + timedelta(days=1), time.min, UTC)
        for row in subscriptions:
            if event in row.events and row.created < end and (row.pk, key) not in known:
                body = _body(row, event, since, until, end)
                rows.append(
                    Delivery(
                        subscription=row,
                        key=key,
                        event=event,
                        body=body,
                        created=now,
                        next_try=now,
                    )
                )
    return rows


def _ended(now: datetime) -> Iterator[tuple[str, date, date]]:
    """`(event, first day, last day)` of the week and month that ended at most three days ago."""
    today = (now - _AFTER).astimezone(UTC).date()
    monday = today - timedelta(days=today.weekday())
    if today - monday < _WITHIN:
        yield "usage_weekly", monday - timedelta(days=7), monday - timedelta(days=1)
    first = today.replace(day=1)
    if today - first < _WITHIN:
        last = first - timedelta(days=1)
        yield "usage_monthly", last.replace(day=1), last


def _body(
    row: Subscription, event: str, since: date, until: date, end: datetime
) -> dict[str, object]:
    own = row.scope == "own"
    by = "pool" if own else "team"
    result = reports.report(user=row.owner, since=since, until=until, by=by, own=own)
    parts = [f"{one.key or 'no ' + by}: {one.device_s / 3600:,.1f}" for one in result.rows[:_SHOWN]]
    hours = result.total.device_s / 3600
    share = result.total.productive_s / result.total.device_s if result.total.device_s else 0.0
    text = f"Usage from {since} to {until}: {hours:,.1f} device-hours, {share:.0%} productive."
    if parts:
        text += f" By {by}: {'; '.join(parts)}."
    usage = {
        "from": since.isoformat(),
        "to": until.isoformat(),
        "by": by,
        "total": result.total.to_dict(),
        "items": [one.to_dict() for one in result.rows],
    }
    return {"event": event, "time": iso(end), "text": text, "usage": usage}
