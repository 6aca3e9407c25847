"""Reads the queue and the fleet as input of `policy`, in a few queries per pass.

At most QUEUE_LIMIT queued runs, the first by priority and time. Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import QuerySet

from orchestrator.fleet.models import Device, Node, Pool
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling.checkpoint_pins import checkpoint_writer
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.policy import (
    ESTIMATE_LIMIT,
    Decision,
    NodeView,
    QueuedRun,
    Slot,
    place,
)
from workers.contracts.wire.node_messages import RunState

QUEUE_LIMIT = 2000


@dataclass(frozen=True)
class Snapshot:
    """Input of one pass."""

    queue: list[QueuedRun]
    nodes: list[NodeView]
    runs: dict[int, Run]
    # run → its checkpoint and the nodes that store it
    resume: dict[int, tuple[dict[str, object], frozenset[str]]]
    quotas: dict[str, int]
    pool_priority: dict[str, int]

    def decide(self, now: datetime, *, estimated: int = ESTIMATE_LIMIT) -> Decision:
        """Apply the policy; `estimated` limits the estimated starts per pool."""
        return place(
            self.queue,
            self.nodes,
            now,
            quotas=self.quotas,
            pool_priority=self.pool_priority,
            estimated=estimated,
        )


def take() -> Snapshot:
    """Read the queue, nodes, quotas and checkpoints."""
    waiting = list(queued()[:QUEUE_LIMIT])
    resume = {
        run.pk: checkpoint
        for run in waiting
        if run.attempt_number or run.forked_from_id
        if (checkpoint := resume_checkpoint(run))
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
    """Queued runs by priority, then by time."""
    return (
        Run.objects.filter(state=RunState.QUEUED)
        .select_related("owner")
        .order_by("-priority", "queued_at", "id")
    )


def resume_checkpoint(run: Run) -> tuple[dict[str, object], frozenset[str]] | None:
    """The run's newest checkpoint, and the names of the nodes that wrote it."""
    point = runs.resume_point(run)
    if point is None:
        return None
    writer = checkpoint_writer(run, step=point["step"])
    return point, frozenset(share["node"] for share in writer.placement) if writer else frozenset()


def node_views() -> list[NodeView]:
    """All nodes with their healthy devices and holders, by name."""
    holders = {
        row.device_id: row
        for row in Allocation.objects.filter(released=None).select_related("attempt__run__owner")
    }
    slots: dict[int, list[Slot]] = {}
    for device in Device.objects.filter(healthy=True).order_by("node_id", "index"):
        slots.setdefault(device.node_id, []).append(_slot(device, holders.get(device.pk)))
    views = []
    for node in Node.objects.select_related("pool").order_by("name"):
        unusable = (
            node.health if node.health != Node.Health.UP else "drained" if node.drained else ""
        )
        views.append(
            NodeView(
                node.name,
                node.pool.name,
                tuple(slots.get(node.pk, [])),
                usable=not unusable,
                unusable_reason=str(unusable),
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


def _waiting(run: Run, resume: tuple[dict[str, object], frozenset[str]] | None) -> QueuedRun:
    resources = run.spec.get("resources") or {}
    # a checkpoint split over several nodes cannot be resumed: see tick
    holders = resume[1] if resume is not None and not settings.ENV.shared_runs else frozenset()
    return QueuedRun(
        run=run.pk,
        devices=max(1, run.devices),
        pool=run.pool_name,
        queued_at=run.queued_at.timestamp(),
        priority=run.priority,
        owner=run.owner.get_username(),
        device=resources.get("device"),
        not_before=run.not_before.timestamp() if run.not_before else None,
        max_seconds=resources.get("max_seconds"),
        checkpoint_nodes=tuple(holders) if len(holders) == 1 else (),
    )
