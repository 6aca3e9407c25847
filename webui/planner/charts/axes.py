"""Axes and round ticks of the planner's charts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from webui.presentation import formatting

_SHORT: Final = (0.01, 0.1, 1.0, 3.0, 10.0)
# round numbers of seconds
_LONG: Final = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A labeled position on an axis; `at` in percent."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic range of values."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Returns the position of the value in percent."""
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 3)


def axis(values: list[float], *, zero: bool = False, log: bool = False) -> Axis:
    """Returns an axis over the values with a margin; `zero` makes it start at 0."""
    low, high = min(values), max(values)
    if log and low > 0:
        return Axis(low / 1.12, high * 1.12, True) if high > low else Axis(low / 2, high * 2, True)
    room = (high - low or abs(high) or 1.0) * 0.06
    return Axis(0.0 if zero else max(0.0, low - room), high + room)


def ticks(over: Axis, unit: str, most: int = 5) -> list[Tick]:
    """Returns about `most` round ticks at most."""
    if unit == "s" and over.log and over.high > 120:
        inside = [step for step in (*_SHORT, *_LONG) if over.low <= step <= over.high]
        values = inside[:: max(1, -(-len(inside) // most))]
    elif unit == "s" and not over.log and over.high - over.low > 90:
        step = next((step for step in _LONG if (over.high - over.low) / step <= most), _LONG[-1])
        values = [
            index * step for index in range(math.ceil(over.low / step), int(over.high / step) + 1)
        ]
    else:
        values = (
            _log_values(over, most)
            if over.log
            else _values(over, most, 1024 if unit == "bytes" else 1000)
        )
    return [Tick(over.at(value), format_tick(value, unit)) for value in values]


def format_tick(value: float, unit: str) -> str:
    """Formats a tick's value in its unit."""
    if unit == "bytes":
        return formatting.memory(value) if value else "0"
    if unit == "s":
        return (
            formatting.seconds(value).removesuffix(" 00 s").removesuffix(" 00 min")
            if value
            else "0"
        )
    return formatting.quantity(value)


def _values(over: Axis, most: int, base: int) -> list[float]:
    rough = (over.high - over.low) / most
    scale = float(base) ** math.floor(math.log(rough, base)) if rough > 0 else 1.0
    ten = 10.0 ** math.floor(math.log10(rough / scale)) * scale
    step = next(
        (nice * ten for nice in (1, 2, 2.5, 5, 10) if nice * ten >= rough * 0.999), 10 * ten
    )
    first = math.ceil(over.low / step)
    return [index * step for index in range(first, int(over.high / step) + 1)]


def _log_values(over: Axis, most: int) -> list[float]:
    first, last = math.floor(math.log10(over.low)), math.ceil(math.log10(over.high))
    for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        values = [nice * 10.0**power for power in range(first, last + 1) for nice in steps]
        inside = [value for value in values if over.low <= value <= over.high]
        if len(inside) <= most + 1:
            return inside
    return inside
