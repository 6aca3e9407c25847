"""/metrics: the control plane's own gauges as OpenMetrics text, open to scrapers.

Totals only: no run, user or node is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from orchestrator.fleet import selectors as fleet
from orchestrator.runs import selectors as runs
from orchestrator.scheduling import selectors as scheduling
from workers.contracts.wire.node_messages import RunState


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Every gauge, read from the database at the time of the request."""
    text = generate_latest(_registry)  # type: ignore[no-untyped-call]
    headers = {"Cache-Control": "no-store"}
    return HttpResponse(text, content_type=CONTENT_TYPE_LATEST, headers=headers)


class ControlPlaneCollector(Collector):
    """Reads the gauges at each scrape."""

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """No families: registering the collector must not read the database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per metric; a value that is not known has no sample."""
        health = scheduling.health()
        counts = runs.state_counts(user=None)
        capacity, busy = fleet.capacity(), len(scheduling.allocations_by_device())
        states = {str(state): counts.get(state, 0) for state in RunState}
        yield _gauge("orrery_healthy", "1 while scheduler and Redis are alive", health["ok"])
        yield _gauge(
            "orrery_scheduler_age_seconds",
            "time since the scheduler's last tick",
            health["scheduler"]["age_s"],
        )
        yield _gauge("orrery_redis_up", "1 while Redis answers", health["redis"]["ok"])
        yield _gauge(
            "orrery_ingest_lag_seconds",
            "age of the oldest unstored telemetry",
            health["ingest"]["lag_s"],
        )
        yield _gauges("orrery_nodes", "nodes by health", "health", health["nodes"])
        yield _gauges(
            "orrery_devices",
            "healthy devices",
            "use",
            {"busy": busy, "idle": max(0, capacity - busy)},
        )
        yield _gauges("orrery_runs", "runs by state", "state", states)


def _gauge(name: str, documentation: str, value: float | None) -> GaugeMetricFamily:
    unit = "seconds" if name.endswith("_seconds") else ""
    family = GaugeMetricFamily(name, documentation, unit=unit)
    if value is not None:
        family.add_metric([], value)
    return family


def _gauges(
    name: str, documentation: str, label: str, values: Mapping[str, float | None]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, documentation, labels=[label])
    for label_value, value in values.items():
        if value is not None:
            family.add_metric([label_value], value)
    return family


_registry = CollectorRegistry()
_registry.register(ControlPlaneCollector())
