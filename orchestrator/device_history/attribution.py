"""Divides a minute's readings among the attempts that held the devices. Pure functions.

An attempt gets the power of the devices that it held, and of the node's CPUs the share that its
devices are of the node's devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.device_history.gathering import NodeMinute
from orchestrator.device_history.series import DEVICE, IDLE_BELOW, MAX, MEAN, MINUTE_S, NODE, POOL

_USE, _POWER = DEVICE.index("utilization"), DEVICE.index("power_w")
_NODE_POWER = NODE.index("power_w")


class Held(NamedTuple):
    """A device that an attempt held within the minute; `open`: it holds it now."""

    device: int
    attempt: int
    seconds: float
    since: float  # Unix seconds of the allocation
    open: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is."""

    device: int
    node: int
    index: int
    pool: str
    gpu: bool


@dataclass(slots=True)
class Used:
    """What an attempt's devices did in the minute; see `models.AttemptHour`."""

    read_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0
    measured_s: float = 0.0
    energy_j: float = 0.0


@dataclass(slots=True)
class Attributed:
    """Of a minute: use by attempt, sums by pool in the order of `POOL`, and idle devices.

    `open`: `{device: attempt}` of devices that are held now; `read`: those of them with readings;
    `idle`: `{device: (attempt, since)}` of those that did no work in the minute.
    """

    attempts: dict[int, Used] = field(default_factory=dict)
    pools: dict[str, list[float]] = field(default_factory=dict)
    idle: dict[int, tuple[int, float]] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


def attribute(
    points: Mapping[int, NodeMinute],
    places: Iterable[Place],
    held: Iterable[Held],
    *,
    minute: int,
) -> Attributed:
    """Attribute the minute's points of nodes; `held` may name a device several times."""
    result = Attributed()
    by_device: dict[int, list[Held]] = {}
    for one in held:
        by_device.setdefault(one.device, []).append(one)
        if one.open:
            result.open[one.device] = one.attempt
    readings = {node: _readings(point) for node, point in points.items()}
    for place in places:
        sums = result.pools.setdefault(place.pool, [0.0] * len(POOL))
        holders = by_device.get(place.device, ())
        share = min(1.0, sum(one.seconds for one in holders) / MINUTE_S)
        sums[1] += share
        reading = readings.get(place.node)
        values = reading.devices.get(place.index) if reading is not None else None
        if reading is None or values is None:
            continue
        mean, most, power = values
        idle = most < IDLE_BELOW  # false for NaN
        sums[0] += 1
        sums[2] += share if most >= IDLE_BELOW else 0.0
        sums[3] += share if idle else 0.0
        sums[4] += 0.0 if math.isnan(mean) else mean
        watts = _watts(place, power, reading)
        sums[5] += 0.0 if math.isnan(watts) else watts
        sums[6] += 0.0 if math.isnan(watts) else 1.0
        for one in holders:
            used = result.attempts.setdefault(one.attempt, Used())
            used.read_s += one.seconds
            used.idle_s += one.seconds if idle else 0.0
            used.busy_s += 0.0 if math.isnan(mean) else mean * one.seconds
            if not math.isnan(watts):
                used.measured_s += one.seconds
                used.energy_j += watts * one.seconds
            if one.open:
                result.read.add(place.device)
                if idle:
                    result.idle[place.device] = one.attempt, max(one.since, float(minute))
    return result


class _Readings(NamedTuple):
    """`devices`: index to mean and largest utilization and mean power."""

    devices: dict[int, tuple[float, float, float]]
    cpu_power_w: float


def _readings(point: NodeMinute) -> _Readings:
    table = point.devices
    rows = zip(
        table[:, _USE, MEAN].tolist(),
        table[:, _USE, MAX].tolist(),
        table[:, _POWER, MEAN].tolist(),
        strict=True,
    )
    power = float(point.other[_NODE_POWER, MEAN])
    return _Readings(dict(zip(point.indexes, rows, strict=True)), power)


def _watts(place: Place, power: float, reading: _Readings) -> float:
    """Power of a device with its share of the CPUs; NaN if its own power is not measured."""
    cpu = reading.cpu_power_w / len(reading.devices)
    if not place.gpu:
        return cpu
    return power if math.isnan(cpu) else power + cpu
