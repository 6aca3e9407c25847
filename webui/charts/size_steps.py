"""A picture of the devices that an elastic run held over time: one step per attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

WIDTH, HEIGHT = 720.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 12.0, 14.0, 30.0
_LEAST_WIDTH: Final = 1.5  # of a short attempt


class HeldDevices(NamedTuple):
    """An attempt: its devices from its start to its end."""

    number: int
    devices: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Step:
    """An attempt as a box from the axis up to its devices."""

    x: float
    y: float
    width: float
    height: float
    number: int
    devices: int


@dataclass(frozen=True, slots=True)
class SizeSteps:
    """Boxes of all attempts, ticks of devices `(y, devices)`, and the times at both ends."""

    steps: tuple[Step, ...]
    ticks: tuple[tuple[float, int], ...]
    first: datetime
    last: datetime
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    base: float = HEIGHT - BOTTOM


def size_steps(held: Sequence[HeldDevices], sizes: Sequence[int]) -> SizeSteps | None:
    """The picture of these attempts by time; `sizes` are ticks. None before the first attempt."""
    if not held:
        return None
    first, last = min(each.start for each in held), max(each.end for each in held)
    span_s = max((last - first).total_seconds(), 1e-9)
    most = max([*sizes, *(each.devices for each in held)])
    base = HEIGHT - BOTTOM

    def x(time: datetime) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (time - first).total_seconds() / span_s

    def y(devices: int) -> float:
        return base - (base - TOP) * devices / most

    steps = tuple(
        Step(
            round(x(each.start), 1),
            round(y(each.devices), 1),
            round(max(_LEAST_WIDTH, x(each.end) - x(each.start)), 1),
            round(base - y(each.devices), 1),
            each.number,
            each.devices,
        )
        for each in sorted(held)
    )
    shown = sorted(set(sizes))
    while len(shown) > 6:  # enough to read the axis
        shown = [*shown[:-1:2], shown[-1]]
    return SizeSteps(steps, tuple((round(y(size), 1), size) for size in shown), first, last)
