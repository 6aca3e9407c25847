"""Reads the queue with reasons, device allocations, and the health of the control plane.

The queue omits runs that the user may not see; callers of `allocations` must hide names themselves.
Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling import lease
from orchestrator.scheduling.models import Allocation, Lease
from orchestrator.scheduling.placement import reasons, snapshot
from orchestrator.scheduling.stream_health import broker_health
from workers.contracts.wire.node_messages import RunState


@dataclass(frozen=True)
class QueueEntry:
    """A waiting run; `position` counts over the full queue, `may_start` is None if unknown."""

    run: Run
    position: int
    reason: str
    may_start: datetime | None


@dataclass(frozen=True)
class Overview:
    """Usage of the fleet, runs that the user may see, and problems."""

    devices: int
    busy: int
    nodes: int
    running: list[Run]
    waiting: list[QueueEntry]
    troubles: list[str]

    @property
    def waiting_devices(self) -> int:
        """Devices that all visible waiting runs need."""
        return sum(entry.run.devices for entry in self.waiting)


def queue_visible_to(*, user: User) -> list[QueueEntry]:
    """Waiting runs in scheduling order, each with its current reason and estimated start."""
    now = clock.now()
    current = snapshot.take()
    decision = current.decide(now)
    status = {wait.run: (wait.reason, wait.may_start) for wait in decision.waits}
    for placement in decision.placements:
        status[placement.run] = (reasons.NEXT_PASS, now.timestamp())
    order = sorted(
        current.queue,
        key=lambda run: (
            -run.priority,
            -current.pool_priority.get(run.pool, 0),
            run.queued_at,
            run.run,
        ),
    )
    visible = set(
        runs.runs_visible_to(user=user)
        .filter(state=RunState.QUEUED)
        .order_by()
        .values_list("pk", flat=True)
    )
    entries = []
    for position, waiting in enumerate(order, start=1):
        if waiting.run in visible:
            reason, start = status[waiting.run]
            may_start = clock.from_unix(start) if start is not None else None
            entries.append(QueueEntry(current.runs[waiting.run], position, reason, may_start))
    return entries


def allocations(*, since: datetime) -> QuerySet[Allocation]:
    """Allocations that lasted beyond `since`, oldest first, with attempt, run and owner."""
    rows = Allocation.objects.filter(Q(released=None) | Q(released__gt=since))
    return rows.select_related("attempt__run__owner", "device").order_by("created", "id")


def allocations_by_device() -> dict[int, Allocation]:
    """Current allocations by the device's primary key."""
    held = Allocation.objects.filter(released=None).select_related("attempt__run__owner", "device")
    return {allocation.device_id: allocation for allocation in held}


def overview(*, user: User) -> Overview:
    """Usage of the fleet, and the runs that the user may see."""
    nodes = list(Node.objects.order_by("name"))
    serving = [node.pk for node in nodes if node.health == Node.Health.UP]
    devices = Device.objects.filter(healthy=True, node_id__in=serving).count()
    busy = Allocation.objects.filter(released=None, device__node_id__in=serving).count()
    alive = [RunState.STARTING, RunState.RUNNING, RunState.STOPPING]
    running = list(runs.runs_visible_to(user=user).filter(state__in=alive).order_by("-id")[:200])
    return Overview(
        devices, busy, len(nodes), running, queue_visible_to(user=user), health()["troubles"]
    )


def health() -> dict[str, Any]:
    """Health of the control plane and the nodes.

    `{ok, troubles, scheduler, redis, reports, ingest, nodes, queue}`
    """
    now = clock.now()
    troubles: list[str] = []
    row = Lease.objects.filter(name=lease.NAME).first()
    age_s = (now - row.beat).total_seconds() if row and row.beat else None
    late = age_s is None or age_s > max(15.0, 5 * settings.ENV.tick_s)
    if late:
        status = "has not run yet" if age_s is None else f"last ran {age_s:.0f} s ago"
        troubles.append(f"the scheduler {status}; no run starts until it works again")
    broker = broker_health()
    if not broker["redis"]["ok"]:
        troubles.append("Redis does not answer; runs continue, and nodes buffer their reports")
    elif broker["ingest"]["lag_s"] > 30:
        troubles.append(f"ingest is {broker['ingest']['lag_s']:.0f} s behind; charts are delayed")
    counts = {str(health): 0 for health in Node.Health.values}
    for name, health_ in Node.objects.values_list("name", "health"):
        counts[health_] += 1
        if health_ != Node.Health.UP:
            troubles.append(f"node {name} is {health_}")
    return {
        "ok": not late and broker["redis"]["ok"],
        "troubles": troubles,
        "scheduler": {
            "age_s": None if age_s is None else round(age_s, 1),
            "holder": row.holder if row else None,
        },
        **broker,
        "nodes": counts,
        "queue": {"waiting": Run.objects.filter(state=RunState.QUEUED).count()},
    }
