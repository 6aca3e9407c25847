"""The record of preflight probes per node: stores rates, gives references, lists them over time.

A reference is the median of the newest good rates. Those before the last lifted preflight cordon do
not count: the operator has accepted the node as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from statistics import median
from typing import Any, Final, NamedTuple

from django.db.models import Max, QuerySet

from orchestrator.common import clock
from orchestrator.fleet.models import Cordon, Node, ProbeResult
from workers.contracts.wire.maintenance.preflight import PreflightReport

LEAST: Final = 3  # good rates; with fewer there is no reference
NEWEST: Final = 20  # good rates of a reference

Key = tuple[str, int | None, int]  # measure, device, ranks


class ProbeSeries(NamedTuple):
    """The rates of one measure on a node, oldest first."""

    measure: str
    device: int | None
    ranks: int
    times: list[datetime]
    values: list[float]
    ok: list[bool]

    @property
    def typical(self) -> float:
        """The median of the good rates, or of all."""
        good = [value for value, ok in zip(self.values, self.ok, strict=True) if ok]
        return median(good or self.values)


def record(*, node: Node, run: int, attempt: int, report: PreflightReport) -> None:
    """Store the rates of a report once."""
    low = {(item.measure, item.device) for item in report.shortfalls}
    now = clock.now()
    ProbeResult.objects.bulk_create(
        (
            ProbeResult(
                node=node,
                time=now,
                run=run,
                attempt=attempt,
                measure=value.measure,
                device=value.device,
                ranks=value.ranks,
                value=value.value,
                ok=(value.measure, value.device) not in low,
            )
            for value in report.values
        ),
        ignore_conflicts=True,
    )


def references(*, nodes: Collection[str]) -> dict[str, list[dict[str, Any]]]:
    """`{node: ProbeReference as data}` from the nodes' own records."""
    since = dict(
        Cordon.objects.filter(node__name__in=nodes, cause=Cordon.Cause.PREFLIGHT)
        .exclude(lifted=None)
        .values_list("node__name")
        .annotate(last=Max("lifted"))
    )
    rates: dict[tuple[str, Key], list[float]] = defaultdict(list)
    rows = ProbeResult.objects.filter(node__name__in=nodes, ok=True).order_by("-time", "-id")
    for name, time, measure, device, ranks, value in rows.values_list(
        "node__name", "time", "measure", "device", "ranks", "value"
    ):
        some = rates[name, (measure, device, ranks)]
        if len(some) < NEWEST and (name not in since or time > since[name]):
            some.append(value)
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in nodes}
    for (name, (measure, device, ranks)), values in rates.items():
        if len(values) >= LEAST:
            result[name].append(
                {
                    "measure": measure,
                    "device": device,
                    "ranks": ranks,
                    "value": median(values),
                    "samples": len(values),
                }
            )
    return result


def probes_of(*, node: Node) -> QuerySet[ProbeResult]:
    """The node's rates, newest first."""
    return node.probes.order_by("-id")


def series_of(rows: Iterable[ProbeResult]) -> list[ProbeSeries]:
    """Rates by measure, device and ranks; `rows` are newest first."""
    series: dict[Key, ProbeSeries] = {}
    for row in reversed(list(rows)):
        key = (row.measure, row.device, row.ranks)
        one = series.setdefault(key, ProbeSeries(*key, [], [], []))
        one.times.append(row.time)
        one.values.append(row.value)
        one.ok.append(row.ok)
    return sorted(series.values(), key=lambda one: (one.measure, one.ranks, one.device or 0))
