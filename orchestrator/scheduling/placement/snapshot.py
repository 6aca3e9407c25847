"""Reads the queue and the fleet as input of `policy`: one query per table, as tuples.

The number of queries does not depend on the number of runs or nodes. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import F, QuerySet

from orchestrator.common import clock
from orchestrator.fleet.cordons import has_open_cordon, usable_devices
from orchestrator.fleet.models import Node, Pool
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.outputs import produce_servers
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.placement import fair_shares, resume_points, topology
from orchestrator.scheduling.placement.changes import own_queue
from orchestrator.scheduling.placement.fair_shares import FairShares
from orchestrator.scheduling.placement.requests import Size
from orchestrator.scheduling.placement.resume_points import ResumePoint
from orchestrator.scheduling.policy import (
    ESTIMATE_LIMIT,
    Decision,
    NodeView,
    QueuedRun,
    Slot,
    place,
)
from orchestrator.scheduling.preemption.resizing import STARTUP_S
from orchestrator.scheduling.reports import cordon_after_failures
from orchestrator.scheduling.reserved import windows
from workers.contracts.specs.run import needs_of
from workers.contracts.wire import versions
from workers.contracts.wire.node_messages import RunState, supported

# a holder may end after this part of the remaining time that its measured progress predicts
EARLY_SHARE = 0.5


@dataclass(frozen=True)
class Snapshot:
    """Input of one pass."""

    queue: list[QueuedRun]
    nodes: list[NodeView]
    reasons: dict[int, str]  # run → its stored wait reason
    resume: dict[int, ResumePoint]
    quotas: dict[str, int]
    pool_priority: dict[str, int]
    shares: FairShares = field(default_factory=FairShares)

    def decide(
        self,
        now: datetime,
        *,
        estimated: int = ESTIMATE_LIMIT,
        queue: Sequence[QueuedRun] | None = None,
        nodes: Sequence[NodeView] | None = None,
    ) -> Decision:
        """Apply the policy; `estimated` limits the estimated starts per pool.

        With another `queue` or other `nodes`: what it would decide then.
        """
        return place(
            self.queue if queue is None else queue,
            self.nodes if nodes is None else nodes,
            now,
            quotas=self.quotas,
            team_quotas=self.shares.quotas,
            usage=self.shares.usage,
            guarantees=self.shares.guarantees,
            pool_priority=self.pool_priority,
            estimated=estimated,
        )


_COLUMNS = (
    "pk",
    "devices",
    "pool_name",
    "queued_at",
    "priority",
    "owner__username",
    "not_before",
    "spec__resources",
    "wait_reason",
    "prediction__step_time_s",
    "spec__train__steps",
    "plan__tp",
    "plan__pp",
    "prediction__comm",
    "sizes",
    "keeps_place_until",
)


def take(*, always: bool = False) -> Snapshot:
    """Read the queue, nodes, quotas and checkpoints; `always` also if no run waits."""
    resume = resume_points.of_queued()
    rows = list(own_queue().order_by().values_list(*_COLUMNS))
    wanted = bool(rows) or always
    shares = fair_shares.read() if wanted else FairShares()
    servers = produce_servers.wait_reasons() if rows else {}
    failed = _failed_on() if rows and settings.ENV.avoid_s else {}
    pools = list(Pool.objects.values_list("name", "max_devices_per_user", "priority"))
    nodes = node_views(shares) if wanted else []
    queue = [
        _queued_run(row, resume.get(row[0]), shares, failed.get(row[0]), servers.get(row[0], ""))
        for row in rows
    ]
    return Snapshot(
        queue=[_undivided(run, resume.get(run.run), nodes) for run in queue],
        nodes=nodes,
        reasons={row[0]: row[8] for row in rows},
        resume=resume,
        quotas={name: most for name, most, _ in pools if most is not None},
        pool_priority={name: priority for name, _, priority in pools},
        shares=shares,
    )


def as_queued(
    runs: QuerySet[Run], points: Mapping[int, ResumePoint], shares: FairShares
) -> dict[int, QueuedRun]:
    """Running runs as they would be queued, to continue from these points, placed first."""
    return {
        row[0]: replace(
            _queued_run(row, points.get(row[0]), shares, None, ""),
            queued_at=clock.now().timestamp(),
            not_before=None,
            keeps_place=True,
        )
        for row in runs.order_by().values_list(*_COLUMNS)
    }


def _queued_run(
    row: tuple[Any, ...],
    resume: ResumePoint | None,
    shares: FairShares,
    failed: tuple[tuple[str, ...], float] | None,
    server: str,
) -> QueuedRun:
    """The policy's view of a row of `_COLUMNS`."""
    return replace(
        _waiting(row[:8], resume, failed, server),
        team=shares.team(row[5]),
        expected_s=_expected_s(row, resume),
        together=max(1, int(row[11] or 1)),
        stages=max(1, int(row[12] or 1)),
        pipeline_close=_pipeline_close(row[13]),
        smaller=_smaller(row[14]),
        keeps_place=row[15] is not None and row[15] > clock.now(),
    )


def _undivided(run: QueuedRun, resume: ResumePoint | None, nodes: Sequence[NodeView]) -> QueuedRun:
    """An elastic run whose checkpoint is in the store, where one node can read it, stays on one.

    Unless no node is large enough for its smallest size.
    """
    if not run.smaller or resume is None or not resume.stored or settings.ENV.shared_runs:
        return run
    usable = [len(node.slots) for node in nodes if node.pool == run.pool and node.usable]
    return run.undivided_on(max(usable, default=0))


def _smaller(sizes: Any) -> tuple[Size, ...]:
    """The sizes of an elastic run below its largest one."""
    if not sizes:
        return ()
    largest, *smaller = sizes
    return tuple(
        Size(
            size["devices"],
            float(size["step_time_s"]) / float(largest["step_time_s"])
            if size["step_time_s"] and largest["step_time_s"]
            else largest["devices"] / size["devices"],
        )
        for size in smaller
    )


def node_views(shares: FairShares | None = None) -> list[NodeView]:
    """All nodes with their usable devices and holders, by name."""
    holders = _holders(shares or FairShares())
    held = dict(Allocation.objects.filter(released=None).values_list("device_id", "attempt_id"))
    slots: dict[int, list[Slot]] = {}
    devices = usable_devices().order_by("node_id", "index")
    for pk, node, index, kind, name, catalogue in devices.values_list(
        "pk", "node_id", "index", "kind", "name", "catalogue"
    ):
        holder = holders.get(held[pk], _UNKNOWN) if pk in held else ()
        slots.setdefault(node, []).append(Slot(index, catalogue or name, kind == "gpu", *holder))
    views, reserved = [], windows.of_nodes(clock.now())
    nodes = Node.objects.order_by("name").values_list(
        "pk",
        "name",
        "pool__name",
        "health",
        "drained",
        "wire",
        "topology",
        has_open_cordon("node"),
        "inventory__isolation__container",
        "inventory__isolation__limits",
    )
    for pk, name, pool, health, drained, wire, path, cordoned, container, limits in nodes:
        skew = versions.skew(versions.WIRE, versions.parse_wire(wire))
        unusable = "of a refused version" if skew is versions.Skew.REFUSED else ""
        unusable = "cordoned" if cordoned else unusable
        unusable = "drained" if drained else unusable
        unusable = health if health != Node.Health.UP else unusable
        views.append(
            NodeView(
                name,
                pool,
                tuple(slots.get(pk, ())),
                usable=not unusable,
                unusable_reason=str(unusable),
                supports=supported(container, limits),
                windows=reserved.get(pk, ()),
                place=topology.parse(path),
            )
        )
    return views


def _failed_on() -> dict[int, tuple[tuple[str, ...], float]]:
    """`{queued run: (nodes, until)}` whose last attempt ended by a recent failure of its nodes."""
    since = clock.now() - timedelta(seconds=settings.ENV.avoid_s)
    rows = Attempt.objects.filter(
        run__state=RunState.QUEUED,
        number=F("run__attempt_number"),
        exit_class__in=cordon_after_failures.CLASSES,
        ended__gte=since,
    )
    return {
        run: (
            tuple(sorted(cordon_after_failures.culprits(placement, exit or {}))),
            ended.timestamp() + settings.ENV.avoid_s,
        )
        for run, placement, exit, ended in rows.values_list("run_id", "placement", "exit", "ended")
        if ended is not None
    }


_Holder = tuple[int, str, float | None, float | None, str]
_UNKNOWN: _Holder = (0, "", None, None, "")


def _holders(shares: FairShares) -> dict[int, _Holder]:
    """`{attempt: (run, owner, latest end, earliest end, team)}` of those that hold devices."""
    rows = (
        Attempt.objects.filter(allocations__released=None, allocations__isnull=False)
        .order_by()
        .distinct()
        .values_list(
            "pk",
            "run_id",
            "run__owner__username",
            "started",
            "created",
            "run__spec__resources__max_seconds",
            "run__summary__eta_s",
            "run__last_seen",
        )
    )
    holders = {}
    for pk, run, owner, started, created, limit, eta_s, seen in rows:
        until = (started or created).timestamp() + limit if limit else None
        early = None
        if eta_s is not None and started is not None and seen is not None:
            early = seen.timestamp() + EARLY_SHARE * float(eta_s)
        holders[pk] = (run, owner, until, early, shares.team(owner))
    return holders


def _expected_s(row: tuple[Any, ...], resume: ResumePoint | None) -> float | None:
    """The predicted time of the remaining steps, at most the limit; None without either."""
    limit = (row[7] or {}).get("max_seconds")
    step_time_s, steps = row[9], row[10]
    if not step_time_s or not steps:
        return limit
    left = max(1, int(steps) - (resume.step if resume is not None else 0))
    predicted = STARTUP_S + float(step_time_s) * left
    return predicted if limit is None else min(predicted, float(limit))


def _pipeline_close(comm: Any) -> bool:
    """Whether the stages of the pipeline communicate more than data ranks, by the prediction."""
    volumes = comm or {}
    return bool((volumes.get("pp_bytes") or 0.0) > (volumes.get("dp_bytes") or 0.0))


def _waiting(
    row: tuple[Any, ...],
    resume: ResumePoint | None,
    failed: tuple[tuple[str, ...], float] | None,
    server: str,
) -> QueuedRun:
    run, devices, pool, queued_at, priority, owner, not_before, wanted = row
    resources: Mapping[str, Any] = wanted or {}
    # a checkpoint split over several nodes cannot be resumed: see tick
    holders: frozenset[str] = frozenset()
    if resume is not None and not resume.stored and not settings.ENV.shared_runs:
        holders = resume.nodes
    return QueuedRun(
        run=run,
        devices=max(1, devices),
        pool=pool,
        queued_at=queued_at.timestamp(),
        priority=priority,
        owner=owner,
        device=resources.get("device"),
        needs=needs_of(resources),
        not_before=not_before.timestamp() if not_before else None,
        max_seconds=resources.get("max_seconds"),
        checkpoint_nodes=tuple(holders) if len(holders) == 1 else (),
        avoid=failed[0] if failed else (),
        avoid_until=failed[1] if failed else None,
        server=server,
    )
