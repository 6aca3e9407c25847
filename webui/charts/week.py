"""Computes device-hours and MFU per day of the last week from allocations. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils.translation import gettext as _

from webui.presentation import formatting

DAYS = 7


@dataclass(frozen=True, slots=True)
class RunAllocation:
    """Devices allocated from `start` to `end` to a run with this MFU, if known."""

    start: datetime
    end: datetime
    mfu: float | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Day:
    """`part` is the bar: allocated device-hours in percent of the fleet's capacity."""

    name: str
    device_hours: float
    part: float
    mfu: float | None


def week(held: Iterable[RunAllocation], *, devices: int, now: datetime) -> list[Day]:
    """Return the last seven days, oldest first; MFU is weighted by allocated time."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    starts = [today - timedelta(days=DAYS - 1 - i) for i in range(DAYS)]
    hours, mfu_hours, known_hours = [0.0] * DAYS, [0.0] * DAYS, [0.0] * DAYS
    for one in held:
        first, last = (one.start - starts[0]).days, (one.end - starts[0]).days
        for i in range(max(0, first), min(DAYS - 1, last) + 1):
            start = starts[i]
            end = min(start + timedelta(days=1), now)
            overlap = (min(one.end, end) - max(one.start, start)).total_seconds() / 3600
            overlap *= one.devices
            if overlap <= 0:
                continue
            hours[i] += overlap
            if one.mfu is not None:
                mfu_hours[i] += overlap * one.mfu
                known_hours[i] += overlap
    days = []
    for i, start in enumerate(starts):
        possible = devices * (min(start + timedelta(days=1), now) - start).total_seconds() / 3600
        mfu = mfu_hours[i] / known_hours[i] if known_hours[i] else None
        part = min(100.0, 100 * hours[i] / possible) if possible else 0.0
        days.append(Day(start.strftime("%a %d"), hours[i], part, mfu))
    return days


def summarize(days: Iterable[Day]) -> str:
    """Return "96.2 device-hours in seven days, average MFU 31.0%."."""
    listed = list(days)
    total = sum(day.device_hours for day in listed)
    if not total:
        return _("No device was used in the last seven days.")
    known = [(day.device_hours, day.mfu) for day in listed if day.mfu is not None]
    weight = sum(hours for hours, _ in known)
    mean = sum(hours * mfu for hours, mfu in known) / weight if weight else None
    text = _("%(hours)s device-hours in seven days") % {"hours": formatting.quantity(total)}
    if mean is not None:
        text += _(", average MFU %(mfu)s") % {"mfu": formatting.percent(mean)}
    return text + "."
