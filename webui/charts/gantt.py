"""Lays out device allocations as bars on a common time axis, in percent. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

WINDOWS = {
    "1h": timedelta(hours=1),
    "6h": timedelta(hours=6),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
}
# of pages with stored readings
LONG_WINDOWS = WINDOWS | {"30d": timedelta(days=30), "90d": timedelta(days=90)}
_STEPS = (60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 86400, 5 * 86400, 15 * 86400)
_LEAST = 0.3  # percent: short allocations stay visible
_TICKS = 8


@dataclass(frozen=True)
class DeviceAllocation:
    """One device allocated to one attempt; `end` is None while it is."""

    device: int
    run: int
    name: str
    state: str
    start: datetime
    end: datetime | None
    attempt: int = 0


@dataclass(frozen=True)
class Lane:
    """Where a bar lies within a row of several devices, in percent of its height."""

    top: float
    height: float
    devices: int


@dataclass(frozen=True)
class Bar:
    """An allocation; `left` and `width` in percent of the window."""

    held: DeviceAllocation
    left: float
    width: float
    seconds: float


@dataclass(frozen=True)
class Tick:
    """A label of the time axis; `left` in percent."""

    left: float
    label: str


@dataclass(frozen=True)
class Gantt:
    """`bars` by device in the requested order; `share` is the allocated part of all device time."""

    bars: dict[int, list[Bar]]
    ticks: list[Tick]
    share: float


def gantt(
    held: Iterable[DeviceAllocation],
    devices: Sequence[int],
    *,
    since: datetime,
    until: datetime,
    now: datetime | None = None,
) -> Gantt:
    """Lay out the allocations of the devices within the window.

    `now` ends the bars of those that are held, if the window ends later.
    """
    span = (until - since).total_seconds()
    bars: dict[int, list[Bar]] = {device: [] for device in devices}
    total = 0.0
    for one in held:
        start, end = max(one.start, since), min(one.end or now or until, until)
        if end < start or one.device not in bars:
            continue
        seconds = (end - start).total_seconds()
        total += seconds
        left = 100 * (start - since).total_seconds() / span
        width = max(_LEAST, 100 * seconds / span)
        bars[one.device].append(
            Bar(one, round(min(left, 100 - width), 3), round(width, 3), seconds)
        )
    for row in bars.values():
        row.sort(key=lambda bar: bar.left)
    return Gantt(bars, time_ticks(since, until), total / (span * len(devices)) if devices else 0.0)


def lanes(rows: Sequence[Sequence[Bar]]) -> list[tuple[Bar, Lane]]:
    """The bars of several devices in one row, a lane per device.

    Bars of one attempt on neighboring devices are joined: it gets and releases them together.
    """
    height = 100 / len(rows) if rows else 100.0
    joined: list[tuple[Bar, int, int]] = []  # first bar, first lane, lanes
    open_: dict[int, int] = {}  # bars that end in the lane above
    for number, bars in enumerate(rows):
        following: dict[int, int] = {}
        for bar in bars:
            at = open_.get(bar.held.attempt)
            if at is None:
                at = len(joined)
                joined.append((bar, number, 1))
            else:
                first, lane, count = joined[at]
                joined[at] = (first, lane, count + 1)
            following[bar.held.attempt] = at
        open_ = following
    return [
        (bar, Lane(round(lane * height, 2), round(count * height, 2), count))
        for bar, lane, count in joined
    ]


def time_ticks(since: datetime, until: datetime) -> list[Tick]:
    """Round times, at most eight."""
    span = (until - since).total_seconds()
    step = next((step for step in _STEPS if span / step <= _TICKS), _STEPS[-1])
    first = -(-int(since.timestamp()) // step) * step
    ticks = []
    for second in range(first, int(until.timestamp()) + 1, step):
        time = datetime.fromtimestamp(second, since.tzinfo)
        left = 100 * (second - since.timestamp()) / span
        ticks.append(Tick(round(left, 3), f"{time:%d %b}" if step >= 86400 else f"{time:%H:%M}"))
    return [tick for tick in ticks if 2 <= tick.left <= 98]
