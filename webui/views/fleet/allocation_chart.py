"""Allocations over time on fleet and node pages: a row per device, or per node of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.utils import timezone
from django.utils.translation import gettext as _

from orchestrator.scheduling import selectors as scheduling
from webui.charts.gantt import LONG_WINDOWS, Bar, DeviceAllocation, Lane, gantt, lanes
from webui.presentation import formatting
from webui.views.fleet.fleet_rows import OTHERS, with_visibility

DEVICE_ROWS: Final = 32  # of more devices, each node is one row


@dataclass(frozen=True)
class Row:
    """A row of the chart; `lane` places each bar within it, in percent of its height."""

    name: str
    title: str
    bars: list[tuple[Bar, Lane]]


def allocations_in(user: Any, devices: Sequence[Any], window: str) -> list[tuple[int, Any, bool]]:
    """`(device, allocation, whether the user may see its run)` of the window and of now."""
    if not devices:
        return []
    since = timezone.now() - LONG_WINDOWS[window]
    ids = [device.pk for device in devices]
    return with_visibility(user, scheduling.allocations(since=since, devices=ids))


def allocation_chart(
    allocations: Sequence[tuple[int, Any, bool]],
    devices: Sequence[Any],
    window: str,
    span: tuple[datetime, datetime] | None = None,
) -> dict[str, Any]:
    """The chart of the window, or of `span`; the devices are sorted by node and index."""
    now: Any = timezone.now()
    since, until = span or (now - LONG_WINDOWS[window], now)
    ids = [device.pk for device in devices]
    held = []
    for device, allocation, visible in allocations:
        run = allocation.attempt.run
        id, name = (run.pk, run.name) if visible else (0, _(OTHERS))
        times = (allocation.created, allocation.released)
        held.append(DeviceAllocation(device, id, name, run.state, *times, allocation.attempt_id))
    drawn = gantt(held, ids, since=since, until=until, now=now)
    per_device = len(devices) <= DEVICE_ROWS
    chart_rows = [*(_device_rows if per_device else _node_rows)(devices, drawn.bars)]
    return {
        "rows": chart_rows,
        "devices": len(devices),
        "ticks": drawn.ticks,
        "share": drawn.share,
        "table": [
            {"name": row.name, "bar": bar, "devices": lane.devices}
            for row in chart_rows
            for bar, lane in row.bars
        ],
        "span": formatting.duration(LONG_WINDOWS[window] / timedelta(seconds=1)),
    }


def _device_rows(devices: Sequence[Any], bars: dict[int, list[Bar]]) -> list[Row]:
    whole = Lane(0, 100, 1)
    return [
        Row(
            f"{device.node.name} · {device.index}",
            _("%(node)s device %(index)s") % {"node": device.node.name, "index": device.index},
            [(bar, whole) for bar in bars[device.pk]],
        )
        for device in devices
    ]


def _node_rows(devices: Sequence[Any], bars: dict[int, list[Bar]]) -> list[Row]:
    nodes: dict[str, list[int]] = {}
    for device in devices:
        nodes.setdefault(device.node.name, []).append(device.pk)
    return [
        Row(name, name, lanes([bars[device] for device in members]))
        for name, members in nodes.items()
    ]
