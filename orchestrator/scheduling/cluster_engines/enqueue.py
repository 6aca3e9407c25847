"""Creates the next attempt of queued runs in pools of engines, with its job, not yet submitted.

The engine decides when and where it starts; the run stays queued until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Q, Sum

from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import kinds
from orchestrator.fleet.models import Engine, Pool
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.outputs import produce_servers
from orchestrator.scheduling.cluster_engines.interface import even_nodes
from orchestrator.scheduling.models import EngineJob
from orchestrator.scheduling.placement import reasons, resume_points
from orchestrator.scheduling.placement.resume_points import ResumePoint
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.wire.cluster_engines.jobs import is_member_name, member_name
from workers.contracts.wire.node_messages import AttemptState, RunState

_PER_NODE = 8  # of a partition that is not known yet
_LATE: Final = timedelta(seconds=5)  # clocks differ, and a submit commits after its time


def enqueue(engine: Engine, pools: Mapping[str, Pool]) -> list[EngineJob]:
    """The new jobs, at most `placements_per_tick`."""
    waiting = _waiting(pools)
    if not waiting:
        return []
    points = resume_points.of_queued()
    new, left_behind = [], {}
    for run in waiting:
        resume, event = _resume(engine, points.get(run.pk))
        new.append(runs.NewAttempt(run, (), resume))
        if event is not None:
            left_behind[run.pk] = event
    with transaction.atomic():
        attempts = runs.attempts_enqueue(new=new)
        jobs = []
        for attempt in attempts:
            pool = pools[attempt.run.pool_name]
            runs.attempt_place(attempt=attempt, placement=_placement(engine, pool, attempt))
            jobs.append(
                EngineJob(
                    attempt=attempt,
                    engine=engine,
                    name=f"orrery-{attempt.run_id}-{attempt.number}-{str(attempt.fence)[:8]}",
                )
            )
            if attempt.run_id in left_behind:
                runs.event_record(
                    run=attempt.run,
                    type="checkpoint_left_behind",
                    data=left_behind[attempt.run_id],
                    attempt=attempt.number,
                )
        return EngineJob.objects.bulk_create(jobs)


def engines_with_new_runs(since: Mapping[int, datetime]) -> set[int]:
    """Keys of the engines with runs that were queued since then, may start and have no job yet.

    `since`: the newest pass by engine; runs that it left waiting, such as those over a quota, wait
    for the next turn. Runs that were queued shortly before it may have been committed after it.
    """
    rows = Pool.objects.filter(engine__in=list(since)).values_list("name", "engine_id")
    pools = {name: id for name, id in rows if id is not None}
    if not pools:
        return set()
    now = clock.now()
    open_attempts = Attempt.objects.exclude(state=AttemptState.EXITED).values("run_id")
    waiting = Run.objects.filter(
        Q(not_before=None) | Q(not_before__lte=now),
        state=RunState.QUEUED,
        pool_name__in=pools,
        queued_at__gte=min(since.values()) - _LATE,
    ).exclude(pk__in=open_attempts)
    newest = waiting.order_by().values_list("pool_name").annotate(Max("queued_at"))
    return {pools[name] for name, queued in newest if queued >= since[pools[name]] - _LATE}


def shape(engine: Engine, pool: Pool, devices: int) -> tuple[int, int, bool]:
    """`(nodes, devices per node, whether they are GPUs)` of this many devices in the pool."""
    chosen = kinds.pool_settings(engine, pool)
    known: dict[str, Any] = next(
        (
            one
            for one in (engine.status or {}).get("partitions", [])
            if one["name"] == chosen.target
        ),
        {},
    )
    gpus, cpus = int(known.get("gpus_per_node") or 0), int(known.get("cpus_per_node") or 0)
    gpu = DEVICES[chosen.device].kind == "gpu" if chosen.device in DEVICES else gpus > 0
    offered = gpus if gpu else cpus // (chosen.cpus_per_device or 1)
    per_node = chosen.devices_per_node or offered or _PER_NODE
    return *even_nodes(devices, per_node), gpu


def _waiting(pools: Mapping[str, Pool]) -> list[Run]:
    """Queued runs without an open attempt, in the order of the queue."""
    now = clock.now()
    open_attempts = Attempt.objects.exclude(state=AttemptState.EXITED).values("run_id")
    rows = (
        Run.objects.filter(state=RunState.QUEUED, pool_name__in=pools)
        .filter(Q(not_before=None) | Q(not_before__lte=now))
        .exclude(pk__in=open_attempts)
        .select_related("owner")
        .order_by("-priority", "queued_at", "id")
    )
    ready = []
    used = _used(pools)
    for run in rows[: settings.ENV.placements_per_tick]:
        quota = pools[run.pool_name].max_devices_per_user
        held = used.get((run.pool_name, run.owner_id), 0)
        if quota is not None and held + run.devices > quota:
            reason = reasons.over_quota(run.devices, run.pool_name, run.owner.username, quota, held)
            if reason != run.wait_reason:
                runs.wait_reasons_set(reasons={run.pk: reason})
            continue
        if run.kind in produce_servers.KINDS:
            ids = sorted(set(produce_servers.named(run.spec).values()))
            if reason := produce_servers.wait_reason(owner=run.owner, ids=ids):
                runs.wait_reasons_set(reasons={run.pk: reason})
                continue
        used[run.pool_name, run.owner_id] = held + run.devices
        ready.append(run)
    return ready


def _used(pools: Mapping[str, Pool]) -> dict[tuple[str, int], int]:
    """Devices of open attempts by pool and owner, waiting ones too, in pools with a quota."""
    limited = [name for name, pool in pools.items() if pool.max_devices_per_user is not None]
    if not limited:
        return {}
    rows = Attempt.objects.exclude(state=AttemptState.EXITED).filter(run__pool_name__in=limited)
    summed = rows.values_list("run__pool_name", "run__owner_id").annotate(Sum("run__devices"))
    return {(pool, owner): total for pool, owner, total in summed.order_by()}


def _placement(engine: Engine, pool: Pool, attempt: Attempt) -> Sequence[dict[str, Any]]:
    nodes, per_node, gpu = shape(engine, pool, max(1, attempt.run.devices))
    return [
        {
            "node": member_name(engine.name, attempt.pk, rank),
            "address": "",
            "devices": list(range(per_node)),
            "node_rank": rank,
            "engine": engine.name,
            "gpu": gpu,
        }
        for rank in range(nodes)
    ]


def _resume(
    engine: Engine, point: ResumePoint | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`(resume_from, None)`, or `(None, event data)` if the engine's nodes lack the checkpoint."""
    if point is None:
        return None, None
    here = all(is_member_name(node) and node.startswith(f"{engine.name}.") for node in point.nodes)
    if (here and point.nodes) or point.stored:
        return point.resume_from, None
    where = ", ".join(sorted(point.nodes)) or "an unknown node"
    message = (
        f"The checkpoint of step {point.step} is stored on {where}, which engine {engine.name} "
        "cannot read; the attempt starts from the beginning. Set ORRERY_STORE_URL to resume "
        "anywhere."
    )
    return None, {"step": point.step, "nodes": sorted(point.nodes), "message": message}
