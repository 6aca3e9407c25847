"""A node over time: readings of its devices and of itself, allocations, and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.device_history import selectors
from orchestrator.device_history.series import DEVICE, MAX, MEAN, MIN, NODE
from orchestrator.fleet import cordons
from orchestrator.runs import selectors as runs
from webui.charts.device_history import (
    Columns,
    Format,
    Reading,
    Track,
    bytes_per_s,
    curve_track,
    heat_track,
)
from webui.charts.gantt import LONG_WINDOWS
from webui.presentation import event_messages, formatting
from webui.views.access import PageRequest, page
from webui.views.fleet.allocation_chart import allocation_chart, allocations_in
from webui.views.fleet.fleet_rows import OTHERS, node_named

COLUMNS: Final = 96
EVENTS: Final = 60  # newest ones shown
# events of runs that say something about the node
_TYPES: Final = (
    "disk_full",
    "hang",
    "out_of_memory",
    "store_problem",
    "straggler",
    "node_cordoned",
    "node_lost",
)
_FAILED: Final = {
    "user_error": gettext_noop("an error of the program"),
    "out_of_memory": gettext_noop("out of memory"),
    "numerics": gettext_noop("values that are not finite"),
    "hang": gettext_noop("a hang"),
    "infrastructure": gettext_noop("an infrastructure failure"),
    "lost": gettext_noop("a lost node"),
}


@dataclass(frozen=True)
class Mark:
    """An event at `left` percent of the time axis; `kind` as of `EventMessage`."""

    left: float
    kind: str
    text: str
    time: datetime
    run: int | None = None


@page
@require_GET
def history(request: PageRequest, name: str) -> HttpResponse:
    """Show the part of the node page that is over time."""
    return render(request, "webui/node_history.html", context(request, node_named(request, name)))


def chosen_window(request: PageRequest) -> str:
    """The time window that the URL names."""
    window = request.GET.get("window", "")
    return window if window in LONG_WINDOWS else "6h"


def context(request: PageRequest, node: Any) -> dict[str, Any]:
    """Context of the template `node_history.html`."""
    window = chosen_window(request)
    devices = list(node.devices.all())
    over = selectors.period(
        until=timezone.now(), seconds=LONG_WINDOWS[window].total_seconds(), points=COLUMNS
    )
    columns = Columns(over.start, over.step_s, over.columns)
    read = selectors.node_history(node=node, over=over)
    allocations = allocations_in(request.user, devices, window)
    memory = max((device.memory_bytes for device in devices), default=0) or None
    total = (node.inventory or {}).get("memory_bytes")
    by_metric = {
        metric: [
            Reading(_("device %(index)s") % {"index": index}, *_statistics(read.devices[row, at]))
            for row, index in enumerate(read.indexes)
        ]
        for at, metric in enumerate(DEVICE)
    }
    of_node = {metric: _statistics(read.other[at]) for at, metric in enumerate(NODE)}
    tracks = [*_device_tracks(by_metric, columns, memory), *_node_tracks(of_node, columns, total)]
    return {
        "name": node.name,
        "tracks": [track for track in tracks if track is not None],
        "power_known": any(track is not None and "power" in track.id for track in tracks),
        "marks": _marks(request.user, node, allocations, columns),
        "ticks": columns.ticks,
        "chart": allocation_chart(allocations, devices, window, (columns.since, columns.until)),
        "window": window,
        "windows": {each: f"?window={each}" for each in LONG_WINDOWS},
        "step": _step(over.step_s),
    }


def _step(seconds: int) -> str:
    """A whole number of minutes or hours as text."""
    if seconds < 3600:
        return _("%(count)s min") % {"count": seconds // 60}
    return _("%(count)s h") % {"count": seconds // 3600}


def _statistics(values: Any) -> tuple[list[float], list[float], list[float]]:
    return values[MIN].tolist(), values[MEAN].tolist(), values[MAX].tolist()


def _device_tracks(
    rows: Mapping[str, Sequence[Reading]], columns: Columns, memory: int | None
) -> list[Track | None]:
    return [
        heat_track(
            "utilization",
            _("Utilization"),
            rows["utilization"],
            columns,
            format=formatting.percent,
            high=1.0,
        ),
        heat_track(
            "memory",
            _("Memory"),
            rows["memory_used_bytes"],
            columns,
            format=formatting.memory,
            high=memory,
        ),
        heat_track("power", _("Power"), rows["power_w"], columns, format=_watts),
        heat_track(
            "temperature",
            _("Temperature"),
            rows["temperature_c"],
            columns,
            format=_celsius,
            low=20.0,
            high=95.0,
        ),
    ]


def _node_tracks(
    rows: Mapping[str, tuple[list[float], list[float], list[float]]],
    columns: Columns,
    memory: int | None,
) -> list[Track | None]:
    shown: list[tuple[str, str, str, Format, float | None]] = [
        ("cpu_utilization", _("CPU utilization"), "mfu", formatting.percent, 1.0),
        ("memory_used_bytes", _("Memory of the node"), "mem-params", formatting.memory, memory),
        ("power_w", _("CPU power"), "event", _watts, None),
        ("temperature_c", _("CPU temperature"), "fail", _celsius, 100.0),
        ("received_bytes_per_s", _("Network, received"), "throughput", bytes_per_s, None),
        ("sent_bytes_per_s", _("Network, sent"), "lr", bytes_per_s, None),
        ("rdma_received_bytes_per_s", _("RDMA, received"), "throughput", bytes_per_s, None),
        ("rdma_sent_bytes_per_s", _("RDMA, sent"), "lr", bytes_per_s, None),
    ]
    return [
        curve_track(
            f"node-{metric}",
            title,
            Reading(_("node"), *rows[metric]),
            columns,
            format=format,
            hue=hue,
            high=high,
        )
        for metric, title, hue, format, high in shown
    ]


def _watts(value: float) -> str:
    return f"{formatting.quantity(value)} W"


def _celsius(value: float) -> str:
    return f"{value:.0f} °C"


def _marks(
    user: Any, node: Any, allocations: Sequence[tuple[int, Any, bool]], columns: Columns
) -> list[Mark]:
    """Cordons, failed attempts, and events of the runs that the user may see; oldest first."""
    events: list[tuple[datetime, str, str, int | None]] = []
    for row in cordons.cordons_of(node=node)[:EVENTS]:
        what = _("device %(index)s") % {"index": row.device.index} if row.device else _("the node")
        text = _("Cordon of %(what)s: %(reason)s") % {
            "what": what,
            "reason": row.reason or _("no reason given"),
        }
        events.append((row.created, "event", text, None))
        if row.lifted:
            events.append(
                (row.lifted, "good", _("Cordon of %(what)s lifted") % {"what": what}, None)
            )
    attempts = {row.attempt_id: (row.attempt, visible) for _device, row, visible in allocations}
    for attempt, visible in attempts.values():
        if attempt.ended and attempt.exit_class in _FAILED:
            values = {
                "run": _("Run %(id)s") % {"id": attempt.run_id} if visible else _(OTHERS),
                "cause": _(_FAILED[attempt.exit_class]),
            }
            text = _("%(run)s ended by %(cause)s") % values
            run = attempt.run_id if visible else None
            events.append((attempt.ended, "bad", text[:1].upper() + text[1:], run))
    of_runs = {attempt.run_id for attempt, visible in attempts.values() if visible}
    if of_runs:
        rows = runs.events_visible_to(
            user=user, of_runs=of_runs, types=_TYPES, since=columns.since, limit=EVENTS
        )
        for event in rows:
            message = event_messages.event_message(event)
            text = _("Run %(id)s: %(text)s") % {"id": event.run_id, "text": message.text}
            events.append((event.time, message.kind, text, event.run_id))
    marks = [
        Mark(left, kind, text, time, run)
        for time, kind, text, run in sorted(events, key=lambda each: each[0])
        if (left := columns.place(time)) is not None
    ]
    return marks[-EVENTS:]
