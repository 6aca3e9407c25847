"""/metrics: the control plane's own gauges as OpenMetrics text, open to scrapers.

Totals only: no run, user or node is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from orchestrator.api.http import overload
from orchestrator.background_jobs import selectors as jobs
from orchestrator.dead_letters import selectors as dead_letters
from orchestrator.fleet import cordons
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.cluster_engines import services as engines
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

    def describe(self) -> Iterable[Metric]:
        """No families: registering the collector must not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family per metric; a value that is not known has no sample."""
        health = scheduling.health()
        counts = runs.state_counts(user=None)
        capacity, busy = fleet.capacity(), scheduling.held_devices()
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
            "orrery_node_versions",
            "nodes by skew of their agent's wire version; refused ones get no new work",
            "skew",
            health["versions"]["nodes"],
        )
        yield _gauges(
            "orrery_devices",
            "healthy devices",
            "use",
            {"busy": busy, "idle": max(0, capacity - busy)},
        )
        yield _gauges("orrery_cordons", "nodes and devices with a cordon", "of", cordons.counts())
        yield from _device_time()
        letters = GaugeMetricFamily(
            "orrery_dead_letters",
            "open messages that could not be processed, by stream or queue and reason",
            labels=["source", "code"],
        )
        for labels, count in sorted(dead_letters.open_counts().items()):
            letters.add_metric(list(labels), count)
        yield letters
        yield _gauge(
            "orrery_dropped_orders",
            "unreadable messages that agents dropped from their queues since they started",
            fleet.dropped_orders_total(),
        )
        refused = CounterMetricFamily(
            "orrery_refused_requests", "requests that busy web processes refused with 503"
        )
        if (refused_total := overload.refused_total()) is not None:
            refused.add_metric([], refused_total)
        yield refused
        yield _gauges("orrery_runs", "runs by state", "state", states)
        yield _gauges(
            "orrery_engines", "engines by whether they answer", "state", engines.state_counts()
        )
        yield _gauges(
            "orrery_engine_jobs",
            "jobs in engines that have not ended",
            "state",
            scheduling.engine_job_counts(),
        )
        yield from _job_metrics()


def _job_metrics() -> Iterator[Metric]:
    totals = CounterMetricFamily(
        "orrery_job_runs", "runs of periodic jobs", labels=["job", "result"]
    )
    fails = GaugeMetricFamily(
        "orrery_job_failures_in_a_row", "failures since the last good run", labels=["job"]
    )
    for job in jobs.statuses():
        totals.add_metric([job.name, "ok"], job.ok_total)
        totals.add_metric([job.name, "failed"], job.failed_total)
        fails.add_metric([job.name], job.fails)
    yield totals
    yield fails


def _device_time() -> Iterator[Metric]:
    """Counters of final accounts only, so that none decreases."""
    total = scheduling.device_time(final=True)
    lost = CounterMetricFamily(
        "orrery_lost_device_seconds",
        "device time of ended attempts that made no lasting progress",
        labels=["cause"],
        unit="seconds",
    )
    for cause, seconds in total.lost.items():
        lost.add_metric([cause], seconds)
    yield lost
    for name, documentation, seconds in (
        ("allocated", "device time of ended attempts", total.allocated),
        ("queued", "devices times the wait before ended attempts", total.queued),
    ):
        family = CounterMetricFamily(f"orrery_{name}_device_seconds", documentation, unit="seconds")
        family.add_metric([], seconds)
        yield family


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
