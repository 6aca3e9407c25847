"""Seven days of use: device-hours and MFU a day, from who held which device when.

Pure numbers in, bars out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from webui.presentation import formatting

DAYS = 7


@dataclass(frozen=True, slots=True)
class Held:
    """A device held from `start` to `end` by a run whose model FLOPs utilisation is `mfu`, if
    known.
    """

    start: datetime
    end: datetime
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class Day:
    """`part` is the bar: device-hours held as per cent of what the fleet could give."""

    name: str
    device_hours: float
    part: float
    mfu: float | None


def week(held: Iterable[Held], *, devices: int, now: datetime) -> list[Day]:
    """The last seven days, oldest first, today up to now; MFU is weighted by the time held."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    starts = [today - timedelta(days=DAYS - 1 - i) for i in range(DAYS)]
    hours, mfu_hours, known_hours = [0.0] * DAYS, [0.0] * DAYS, [0.0] * DAYS
    for one in held:
        for i, start in enumerate(starts):
            end = min(start + timedelta(days=1), now)
            overlap = (min(one.end, end) - max(one.start, start)).total_seconds() / 3600
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


def sentence(days: Iterable[Day]) -> str:
    """ "96.2 device-hours in seven days, MFU 31.0 % on average." """
    listed = list(days)
    total = sum(day.device_hours for day in listed)
    if not total:
        return "No device was used in the last seven days."
    known = [(day.device_hours, day.mfu) for day in listed if day.mfu is not None]
    weight = sum(hours for hours, _ in known)
    mean = sum(hours * mfu for hours, mfu in known) / weight if weight else None
    told = f", MFU {formatting.percent(mean)} on average" if mean is not None else ""
    return f"{formatting.quantity(total)} device-hours in seven days{told}."
