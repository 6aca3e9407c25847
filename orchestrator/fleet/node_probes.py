"""Probes of idle nodes by day: requests, results and refusals. Does not measure or fit anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db import transaction
from django.db.models import QuerySet

from orchestrator.common import clock
from orchestrator.common.units import iso
from orchestrator.fleet.models import Node, NodeProbe
from workers.contracts.wire.maintenance.node_probe import FULL_S, NodeProbeReport

# a requested probe without an answer for this long has failed: the node vanished, or is older
PATIENCE_S: Final = FULL_S + 120.0
_DAYS: Final = 90  # of the series on a page


class RateSeries(NamedTuple):
    """One rate of a node by day, oldest first."""

    measure: str
    setting: str
    unit: str
    days: list[Any]
    values: list[float]

    @property
    def drift(self) -> float:
        """The newest value over the median of the earlier ones, minus 1; 0 for a single day."""
        earlier = sorted(self.values[:-1])
        return self.values[-1] / earlier[len(earlier) // 2] - 1 if earlier else 0.0


def request_record(*, node: Node, by: str = "") -> NodeProbe:
    """Note that a probe was requested today; a result of today is kept until the new one."""
    now = clock.now()
    values = {
        "state": NodeProbe.State.REQUESTED,
        "requested": now,
        "requested_by": by,
        "message": "",
    }
    row, _ = NodeProbe.objects.update_or_create(node=node, day=now.date(), defaults=values)
    return row


def result_record(
    *, node: Node, report: NodeProbeReport, parameters: Mapping[str, Any]
) -> NodeProbe:
    """Store a result for the day it was measured; a short one does not replace a full one."""
    time = min(datetime.fromtimestamp(report.time, UTC), clock.now())
    values: dict[str, Any] = {"state": NodeProbe.State.DONE, "message": ""}
    with transaction.atomic():
        known = NodeProbe.objects.filter(node=node, day=time.date()).first()
        if not (report.short and known is not None and known.report.get("short") is False):
            values |= {"time": time, "report": report.to_dict(), "parameters": dict(parameters)}
        row, _ = NodeProbe.objects.update_or_create(node=node, day=time.date(), defaults=values)
    return row


def failure_record(*, node: Node, message: str) -> None:
    """Note why today's request has no result."""
    values = {"state": NodeProbe.State.FAILED, "message": message[:500]}
    NodeProbe.objects.update_or_create(node=node, day=clock.now().date(), defaults=values)


def overdue_fail() -> int:
    """Fail requests whose node has not answered; returns their number."""
    return NodeProbe.objects.filter(
        state=NodeProbe.State.REQUESTED,
        requested__lt=clock.now() - timedelta(seconds=PATIENCE_S),
    ).update(
        state=NodeProbe.State.FAILED,
        message="The node did not answer: it is lost, busy, or its agent is older.",
    )


def in_progress(*, node: Node) -> bool:
    """Whether a requested probe has not ended."""
    overdue_fail()
    return node.node_probes.filter(state=NodeProbe.State.REQUESTED).exists()


def probes_of(*, node: Node) -> QuerySet[NodeProbe]:
    """The node's probes, newest first."""
    return node.node_probes.order_by("-id")


def newest_results(*, catalogue: str, pool: str | None = None) -> list[NodeProbe]:
    """The newest result of each node with this device, by node."""
    rows = (
        NodeProbe.objects.filter(node__devices__catalogue=catalogue)
        .exclude(time=None)
        .select_related("node")
        .order_by("node_id", "-day")
        .distinct()
    )
    if pool is not None:
        rows = rows.filter(node__pool__name=pool)
    newest: dict[int, NodeProbe] = {}
    for row in rows:
        newest.setdefault(row.node_id, row)
    return list(newest.values())


def series_of(rows: Sequence[NodeProbe]) -> list[RateSeries]:
    """Rates by measure and setting over days; `rows` are newest first."""
    series: dict[tuple[str, str], RateSeries] = {}
    for row in reversed(rows[:_DAYS]):
        if not row.report:
            continue
        for rate in NodeProbeReport.from_dict(row.report).rates:
            key = (rate.measure, rate.setting)
            one = series.setdefault(key, RateSeries(*key, rate.unit, [], []))
            one.days.append(row.day)
            one.values.append(rate.value)
    return list(series.values())


def serialize(row: NodeProbe) -> dict[str, Any]:
    """The REST representation."""
    report = row.report or {}
    return {
        "id": str(row.pk),
        "day": row.day.isoformat(),
        "state": row.state,
        "requested": iso(row.requested),
        "requested_by": row.requested_by or None,
        "time": iso(row.time) if row.time else None,
        "message": row.message or None,
        **{name: report.get(name) for name in _REPORTED},
        "rates": [
            {**rate.to_dict(), "unit": rate.unit}
            for rate in (NodeProbeReport.from_dict(report).rates if report else [])
        ],
        "steps": report.get("steps", []),
        "problems": report.get("problems", []),
    }


_REPORTED = ("version", "short", "seconds", "ranks", "cores", "load", "versions", "link")
