"""The queue and the fleet as `policy` wants them, read in a handful of queries and kept for one
pass.

Reads only; at most QUEUE_LIMIT waiting runs, the first by priority and time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import QuerySet

from orchestrator.fleet.models import Device, Node, Pool
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling.checkpoint_pins import writer_of
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.policy import ESTIMATED, Decision, NodeView, Slot, Waiting, place
from workers.contracts.wire.node_messages import RunState

QUEUE_LIMIT = 2000


@dataclass(frozen=True)
class Snapshot:
    queue: list[Waiting]
    nodes: list[NodeView]
    runs: dict[int, Run]
    # run → its checkpoint and the nodes that hold it
    resume: dict[int, tuple[dict[str, object], frozenset[str]]]
    quotas: dict[str, int]
    pool_priority: dict[str, int]

    def decide(self, now: datetime, *, estimated: int = ESTIMATED) -> Decision:
        return place(
            self.queue,
            self.nodes,
            now,
            quotas=self.quotas,
            pool_priority=self.pool_priority,
            estimated=estimated,
        )


def take() -> Snapshot:
    """Everything a pass needs."""
    waiting = list(queued()[:QUEUE_LIMIT])
    resume = {
        run.pk: found
        for run in waiting
        if run.attempt_number or run.forked_from_id
        if (found := checkpoint_of(run))
    }
    pools = list(Pool.objects.values_list("name", "max_devices_per_user", "priority"))
    return Snapshot(
        queue=[_waiting(run, resume.get(run.pk)) for run in waiting],
        nodes=node_views(),
        runs={run.pk: run for run in waiting},
        resume=resume,
        quotas={name: most for name, most, _ in pools if most is not None},
        pool_priority={name: priority for name, _, priority in pools},
    )


def queued() -> QuerySet[Run]:
    return (
        Run.objects.filter(state=RunState.QUEUED)
        .select_related("owner")
        .order_by("-priority", "queued_at", "id")
    )


def checkpoint_of(run: Run) -> tuple[dict[str, object], frozenset[str]] | None:
    """What the run would go on from, and the names of the nodes that wrote it."""
    point = runs.resume_point(run)
    if point is None:
        return None
    writer = writer_of(run, step=point["step"])
    return point, frozenset(share["node"] for share in writer.placement) if writer else frozenset()


def node_views() -> list[NodeView]:
    holders = {
        row.device_id: row
        for row in Allocation.objects.filter(released=None).select_related("attempt__run__owner")
    }
    slots: dict[int, list[Slot]] = {}
    for device in Device.objects.filter(healthy=True).order_by("node_id", "index"):
        slots.setdefault(device.node_id, []).append(_slot(device, holders.get(device.pk)))
    views = []
    for node in Node.objects.select_related("pool").order_by("name"):
        away = node.health if node.health != Node.Health.UP else "drained" if node.drained else ""
        views.append(
            NodeView(
                node.name,
                node.pool.name,
                tuple(slots.get(node.pk, [])),
                usable=not away,
                away=str(away),
            )
        )
    return views


def _slot(device: Device, held: Allocation | None) -> Slot:
    kind = device.catalogue or device.name
    if held is None:
        return Slot(device.index, kind, device.kind == "gpu")
    run, attempt = held.attempt.run, held.attempt
    limit = (run.spec.get("resources") or {}).get("max_seconds")
    until = (attempt.started or attempt.created).timestamp() + limit if limit else None
    return Slot(device.index, kind, device.kind == "gpu", run.pk, run.owner.get_username(), until)


def _waiting(run: Run, resume: tuple[dict[str, object], frozenset[str]] | None) -> Waiting:
    resources = run.spec.get("resources") or {}
    # parts on several nodes are no checkpoint to wait for: see tick
    holders = resume[1] if resume is not None and not settings.ENV.shared_runs else frozenset()
    keep = tuple(holders) if len(holders) == 1 else ()
    return Waiting(
        run=run.pk,
        devices=max(1, run.devices),
        pool=run.pool_name,
        queued_at=run.queued_at.timestamp(),
        priority=run.priority,
        owner=run.owner.get_username(),
        device=resources.get("device"),
        not_before=run.not_before.timestamp() if run.not_before else None,
        max_seconds=resources.get("max_seconds"),
        keep=keep,
    )
