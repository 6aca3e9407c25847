"""Generated readings of a node for the gallery: strips with gaps, curves, events."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from random import Random
from typing import Any, Final

from webui.charts.device_history import (
    Columns,
    Reading,
    Track,
    bytes_per_s,
    curve_track,
    heat_track,
)
from webui.presentation import formatting
from webui.views.fleet.node_history import Mark

_COLUMNS: Final = Columns(
    start=int(datetime(2026, 1, 14, 15, tzinfo=UTC).timestamp()), step_s=900, count=96
)
_SILENT: Final = range(40, 46)  # no heartbeat


def gallery_context() -> dict[str, Any]:
    """Return the history part of the gallery's context."""
    random = Random(11)  # reproducible
    rows = [_device(index, random) for index in range(4)]
    tracks = [
        heat_track("sample", "Utilization", rows, _COLUMNS, format=formatting.percent, high=1.0),
        curve_track(
            "sample-network",
            "Network, received",
            _network(random),
            _COLUMNS,
            format=bytes_per_s,
            hue="throughput",
        ),
    ]
    return {
        "tracks": [track for track in tracks if isinstance(track, Track)],
        "marks": [
            _mark(39, "bad", "Run 12 ended by a hang"),
            _mark(46, "event", "Cordon of device 2: new fan"),
            _mark(60, "good", "Cordon of device 2 lifted"),
        ],
        "ticks": _COLUMNS.ticks,
    }


def _device(index: int, random: Random) -> Reading:
    means = []
    for column in range(_COLUMNS.count):
        busy = column < 40 if index != 2 else column > 60
        value = min(1.0, 0.92 + 0.06 * random.random()) if busy or column > 70 else 0.0
        means.append(math.nan if column in _SILENT else value)
    low = [max(0.0, value - 0.1) for value in means]
    return Reading(f"device {index}", low, means, [min(1.0, value + 0.05) for value in means])


def _network(random: Random) -> Reading:
    means = [
        math.nan if column in _SILENT else 4e8 * (1 + 0.3 * math.sin(column / 7) * random.random())
        for column in range(_COLUMNS.count)
    ]
    low = [value * 0.6 for value in means]
    return Reading("node", low, means, [value * 1.8 for value in means])


def _mark(column: int, kind: str, text: str) -> Mark:
    time = datetime.fromtimestamp(_COLUMNS.start + column * _COLUMNS.step_s, UTC)
    return Mark(_COLUMNS.place(time) or 0.0, kind, text, time)
