"""/metrics: the control plane's own numbers as OpenMetrics text. Totals only, no run is named; open
to scrapers.

Knows the text format (OpenMetrics 1.0); the numbers are the rooms'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from orchestrator.fleet import selectors as fleet
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from workers.contracts.wire.node_messages import RunState

MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Gauge(NamedTuple):
    """One family: values by the value of its label, or one under "" without label.

    None is left out: not known.
    """

    name: str
    message: str
    label: str
    values: Mapping[str, float | None]


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    return HttpResponse(
        "".join(_text(_gauges())), content_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"}
    )


def _gauges() -> Iterator[Gauge]:
    facts = scheduling.health()
    counts = runs.state_counts(user=None)
    capacity, busy = fleet.capacity(), len(scheduling.allocations_by_device())
    yield Gauge("orrery_healthy", "1 while scheduler and Redis are alive", "", {"": facts["ok"]})
    yield Gauge(
        "orrery_scheduler_age_seconds",
        "since the scheduler's last pass",
        "",
        {"": facts["scheduler"]["age_s"]},
    )
    yield Gauge("orrery_redis_up", "1 while Redis answers", "", {"": facts["redis"]["ok"]})
    yield Gauge(
        "orrery_ingest_lag_seconds",
        "age of the oldest unstored telemetry",
        "",
        {"": facts["ingest"]["lag_s"]},
    )
    yield Gauge("orrery_nodes", "nodes by health", "health", facts["nodes"])
    yield Gauge(
        "orrery_devices", "healthy devices", "use", {"busy": busy, "idle": max(0, capacity - busy)}
    )
    yield Gauge(
        "orrery_runs", "runs by state", "state", {state: counts.get(state, 0) for state in RunState}
    )


def _text(gauges: Iterator[Gauge]) -> Iterator[str]:
    for gauge in gauges:
        yield f"# TYPE {gauge.name} gauge\n"
        if gauge.name.endswith("_seconds"):
            yield f"# UNIT {gauge.name} seconds\n"
        yield f"# HELP {gauge.name} {gauge.message}\n"
        for value, number in gauge.values.items():
            if number is not None:
                label = f'{{{gauge.label}="{value}"}}' if gauge.label else ""
                yield f"{gauge.name}{label} {float(number)!r}\n"
    yield "# EOF\n"
