"""Collects the readings of heartbeats in memory and reduces each full minute to one point per node.

Thread-safe. Does not depend on the database.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from orchestrator.device_history.packing import Floats
from orchestrator.device_history.series import MAX, MEAN, MIN, MINUTE_S, NODE
from workers.contracts.wire.node_messages import DeviceSample, NodeSample

_LATE_S: Final = 5.0  # heartbeats of a minute that arrive after its end still count
_OLDEST: Final = 10  # minutes in memory while the database is unavailable
_MISSING: Final = float("nan")
_COUNTERS: Final = (
    "received_bytes",
    "sent_bytes",
    "rdma_received_bytes",
    "rdma_sent_bytes",
)


@dataclass(slots=True)
class NodeMinute:
    """One point of a node: `devices` [D, M, S] of the devices `indexes`, `other` [N, S]."""

    indexes: tuple[int, ...]
    devices: Floats
    other: Floats


@dataclass(slots=True)
class _Gathered:
    devices: list[tuple[float, ...]] = field(default_factory=list)  # index, then metrics
    node: list[tuple[float, ...]] = field(default_factory=list)


class Gathering:
    """Readings of the minutes that are not closed yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._minutes: dict[int, dict[int, _Gathered]] = defaultdict(dict)
        self._counters: dict[int, tuple[float, tuple[int | None, ...]]] = {}
        self._closed = 0

    def add(
        self,
        *,
        node: int,
        time: float,
        samples: Sequence[DeviceSample],
        machine: NodeSample | None = None,
    ) -> None:
        """Add a heartbeat's readings of a node; `time` is its arrival in Unix seconds."""
        minute = int(time // MINUTE_S) * MINUTE_S
        rows = [
            (
                one.index,
                _number(one.utilization),
                _number(one.memory_used_bytes),
                _number(one.power_w),
                _number(one.temperature_c),
            )
            for one in samples
        ]
        with self._lock:
            if minute <= self._closed:
                return
            gathered = self._minutes[minute].setdefault(node, _Gathered())
            gathered.devices += rows
            if machine is not None:
                gathered.node.append(self._node_row(node, time, machine))
            while len(self._minutes) > _OLDEST:
                del self._minutes[min(self._minutes)]

    def due(self, now: float) -> list[int]:
        """Starts of the minutes with readings that have ended, oldest first."""
        with self._lock:
            return sorted(minute for minute in self._minutes if minute + MINUTE_S + _LATE_S <= now)

    def take(self, minute: int) -> dict[int, NodeMinute]:
        """`{node: its point}` of an ended minute, whose readings are removed."""
        with self._lock:
            gathered = self._minutes.pop(minute, {})
            self._closed = max(self._closed, minute)
        return {node: _point(readings) for node, readings in gathered.items()}

    def _node_row(self, node: int, time: float, machine: NodeSample) -> tuple[float, ...]:
        """The node's values; counters as rates since its previous heartbeat."""
        counters = tuple(getattr(machine, name) for name in _COUNTERS)
        before = self._counters.get(node)
        self._counters[node] = time, counters
        rates = [_MISSING] * len(_COUNTERS)
        if before is not None and 0 < time - before[0] <= MINUTE_S:
            rates = [
                _MISSING
                if value is None or earlier is None or value < earlier  # restarted
                else (value - earlier) / (time - before[0])
                for value, earlier in zip(counters, before[1], strict=True)
            ]
        return (
            _number(machine.cpu_utilization),
            _number(machine.memory_used_bytes),
            _number(machine.power_w),
            _number(machine.temperature_c),
            *rates,
        )


def _number(value: float | None) -> float:
    return _MISSING if value is None else float(value)


def _point(readings: _Gathered) -> NodeMinute:
    rows = np.array(readings.devices, np.float64).reshape(-1, 5)
    indexes = np.unique(rows[:, 0])
    size = rows.shape[0] // max(1, len(indexes))
    if len(indexes) and size * len(indexes) == rows.shape[0]:
        ordered = rows[np.argsort(rows[:, 0], kind="stable")].reshape(len(indexes), size, 5)
        same = bool((ordered[:, :, 0] == indexes[:, None]).all())
    else:
        same = False
    if same:  # each heartbeat had all devices
        devices = _statistics(ordered[:, :, 1:], axis=1)
    else:
        parts = [_statistics(rows[rows[:, 0] == index, 1:], axis=0) for index in indexes]
        devices = np.array(parts, np.float32).reshape(-1, 4, 3)
    node = np.array(readings.node, np.float64).reshape(-1, len(NODE))
    return NodeMinute(tuple(int(index) for index in indexes), devices, _statistics(node, axis=0))


def _statistics(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], axis: int) -> Floats:
    """Minimum, mean and maximum over an axis as a new last axis; NaN without a reading."""
    known = ~np.isnan(values)
    number = known.sum(axis)
    has = number > 0
    result = np.full((*has.shape, 3), np.nan, np.float32)
    low = np.where(known, values, np.inf).min(axis, initial=np.inf)
    high = np.where(known, values, -np.inf).max(axis, initial=-np.inf)
    mean = np.where(known, values, 0.0).sum(axis) / np.maximum(number, 1)
    for statistic, value in ((MIN, low), (MEAN, mean), (MAX, high)):
        result[..., statistic] = np.where(has, value, np.nan)
    return result
