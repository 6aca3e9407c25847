"""Reads the queue with reasons, device allocations, and the health of the control plane.

The queue omits runs that the user may not see; callers of `allocations` must hide names themselves.
Writes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from django.conf import settings
from django.db.models import Count, Min, Prefetch, Q, QuerySet

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import lease
from orchestrator.scheduling.accounting import ledger
from orchestrator.scheduling.accounting.run_time import RunTime, last_step, run_times
from orchestrator.scheduling.models import Allocation, EngineJob, Lease
from orchestrator.scheduling.queue.waiting import (
    ExpectedStart,
    QueueEntry,
    QueuePage,
    decision_age_s,
    expected_start,
    queue_entries,
    queue_page,
    queue_visible_to,
    waiting_count,
)
from orchestrator.scheduling.stream_health import broker_health
from workers.contracts.wire import versions
from workers.contracts.wire.node_messages import RunState

_REFUSED = f"of a release that this control plane refuses (see {versions.DOCUMENT})"
_INGEST_IDLE_S = 15.0  # a living one reads every second
_SHOWN_NODES = 3  # named in a sentence about many
_ACTIVE = (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)

__all__ = [
    "ExpectedStart",
    "Overview",
    "QueueEntry",
    "QueuePage",
    "RunTime",
    "allocations",
    "allocations_by_device",
    "decision_age_s",
    "device_time",
    "device_time_of_run",
    "expected_start",
    "health",
    "held_by_node",
    "held_devices",
    "held_since",
    "last_step",
    "overview",
    "own_active",
    "queue_entries",
    "queue_page",
    "queue_visible_to",
    "run_times",
    "waiting_count",
]


@dataclass(frozen=True)
class Overview:
    """Usage of the fleet, and runs that the user may see.

    `running` are the newest active runs, cut to a limit; `active` counts them all.
    """

    devices: int
    busy: int
    running: list[Run]
    active: int
    queue: QueuePage


def engine_job_counts() -> dict[str, int]:
    """Jobs in engines by state, without ended ones."""
    states = [state for state in EngineJob.State.values if state != EngineJob.State.ENDED]
    rows = EngineJob.objects.filter(state__in=states).values_list("state")
    return {**dict.fromkeys(states, 0), **dict(rows.annotate(count=Count("pk")).order_by())}


def engine_job_of(run: Run) -> EngineJob | None:
    """The newest job of the run in another engine, with its engine; None for its own scheduler."""
    jobs = EngineJob.objects.filter(attempt__run=run).select_related("engine")
    return jobs.order_by("-pk").first()


def allocations(*, since: datetime, devices: Collection[int] | None = None) -> QuerySet[Allocation]:
    """Allocations that lasted beyond `since`, oldest first, with attempt, run and owner.

    `devices` limits them to devices with these primary keys.
    """
    rows = Allocation.objects.filter(Q(released=None) | Q(released__gt=since))
    if devices is not None:
        rows = rows.filter(device_id__in=devices)
    # one object per run, not one per device of a gang
    return rows.prefetch_related(_light_runs()).order_by("created", "id")


def allocations_by_device(devices: Collection[int] | None = None) -> dict[int, Allocation]:
    """Current allocations by the device's primary key, of all devices or of these."""
    held = Allocation.objects.filter(released=None).prefetch_related(_light_runs())
    if devices is not None:
        held = held.filter(device_id__in=devices)
    return {row.device_id: row for row in held if row.device_id is not None}


def held_devices() -> int:
    """Number of devices that are allocated now."""
    return Allocation.objects.filter(released=None, device__isnull=False).count()


def held_since(*, since: datetime) -> list[tuple[datetime, datetime | None, Any, int]]:
    """`(created, released, MFU of the run, devices)` of allocations that lasted beyond `since`.

    One row per attempt, which gets and releases its devices together.
    """
    rows = Allocation.objects.filter(Q(released=None) | Q(released__gt=since)).order_by()
    grouped = rows.values_list("attempt", "released", "attempt__run_id")
    counted = list(grouped.annotate(Min("created"), Count("id")))
    rates = runs.values_of({run for _, _, run, *_ in counted}, ("summary__mfu",))
    return [
        (created, released, rates.get(run, (None,))[0], devices)
        for _, released, run, created, devices in counted
    ]


class HeldShare(NamedTuple):
    """What a run holds on a node now: number of devices, and the run's state and last step."""

    run: int
    devices: int
    state: str
    last_step: float | None  # Unix seconds; None if silence is normal
    step_time_s: float | None


def held_by_node() -> dict[int, list[HeldShare]]:
    """Current allocations by the node's primary key, one entry per run. Names nothing."""
    held = Allocation.objects.filter(released=None, device__isnull=False)
    rows = held.values_list("device__node_id", "attempt__run_id", "attempt__started")
    counted = list(rows.annotate(Count("id")).order_by())
    fields = ("state", "kind", "summary__time", "summary__step_time_s")
    known = {pk: values for pk, *values in runs.active_values(fields)}
    shares: dict[int, list[HeldShare]] = {}
    starting = (str(RunState.STARTING), "", None, None)
    for node, run, started, devices in counted:
        state, kind, time, step_time_s = known.get(run, starting)
        step_time_s = step_time_s if isinstance(step_time_s, int | float) else None
        share = HeldShare(run, devices, state, last_step(kind, time, started), step_time_s)
        shares.setdefault(node, []).append(share)
    return shares


def _light_runs() -> Prefetch[Any]:
    """Attempts with their runs and owners, without specs and plans."""
    attempts = Attempt.objects.select_related("run__owner").defer(
        "run__spec", "run__plan", "run__prediction"
    )
    return Prefetch("attempt", queryset=attempts)


def device_time_of_run(
    run: Run,
) -> tuple[ledger.Total | None, list[tuple[Attempt, ledger.Total | None]]]:
    """Device time of the run's accounted attempts, and each attempt with its own, newest first."""
    return ledger.of_run(run)


def device_time(*, since: datetime | None = None, final: bool = False) -> ledger.Total:
    """Device time of all attempts that ended since then; `final` omits those that may change."""
    return ledger.total(since=since, final=final)


def overview(*, user: User, runs_shown: int, waiting_shown: int) -> Overview:
    """Usage of the fleet, and the runs that the user may see."""
    serving = Device.objects.filter(node__health=Node.Health.UP)
    held = Allocation.objects.filter(released=None, device__node__health=Node.Health.UP)
    visible = runs.runs_visible_to(user=user).filter(state__in=_ACTIVE)
    return Overview(
        devices=serving.filter(healthy=True).count(),
        busy=held.count(),
        running=list(visible.order_by("-id")[:runs_shown]),
        active=visible.count(),
        queue=queue_page(user=user, limit=waiting_shown),
    )


def own_active(*, user: User, runs_shown: int) -> tuple[list[Run], int]:
    """The newest active runs that the user submitted, and the number of all of them."""
    own = runs.runs_visible_to(user=user).filter(state__in=_ACTIVE, owner=user)
    count = own.count()
    return list(own.order_by("-id")[:runs_shown]) if count else [], count


def _listed_nodes(names: list[str], state: str) -> str:
    """One sentence for all nodes of a state: "node a is lost", "12 nodes are lost: a, b, c, …"."""
    if len(names) == 1:
        return f"node {names[0]} is {state}"
    shown = ", ".join(names[:_SHOWN_NODES]) + (", …" if len(names) > _SHOWN_NODES else "")
    return f"{len(names)} nodes are {state}: {shown}"


def health() -> dict[str, Any]:
    """Health of the control plane and the nodes.

    `{ok, troubles, scheduler, redis, reports, ingest, nodes, versions, queue}`
    """
    now = clock.now()
    troubles: list[str] = []
    row = Lease.objects.filter(name=lease.NAME).first()
    age_s = (now - row.beat).total_seconds() if row and row.beat else None
    late = age_s is None or age_s > max(15.0, 5 * settings.ENV.tick_s)
    if late:
        status = "has not run yet" if age_s is None else f"last ran {age_s:.0f} s ago"
        troubles.append(f"the scheduler {status}; no run starts until it works again")
    rows = list(Node.objects.order_by("name").values_list("name", "health", "loss_held", "wire"))
    broker = broker_health([name for name, *_ in rows])
    if not broker["redis"]["ok"]:
        troubles.append("Redis does not answer; runs continue, and nodes buffer their reports")
    elif (broker["ingest"]["idle_s"] or 0.0) > _INGEST_IDLE_S:
        troubles.append(
            f"ingest has not read for {broker['ingest']['idle_s']:.0f} s; points wait, and charts "
            "are delayed"
        )
    elif broker["ingest"]["lag_s"] > 30:
        troubles.append(f"ingest is {broker['ingest']['lag_s']:.0f} s behind; charts are delayed")
    counts = {str(health): 0 for health in Node.Health.values}
    skews = {str(skew): 0 for skew in versions.Skew}
    gone: dict[str, list[str]] = {}
    held = 0
    for name, health_, loss_held, wire in rows:
        skew = versions.skew(versions.WIRE, versions.parse_wire(wire))
        skews[skew] += 1
        if skew is versions.Skew.REFUSED:
            gone.setdefault(_REFUSED, []).append(name)
        counts[health_] += 1
        held += loss_held
        if health_ != Node.Health.UP:
            gone.setdefault(health_, []).append(name)
    troubles += [_listed_nodes(names, state) for state, names in gone.items()]
    if held:
        troubles.append(
            f"{held} of {sum(counts.values())} nodes have sent no heartbeat for too long; their "
            "runs wait until an operator confirms on the nodes' pages that they are lost"
        )
    return {
        "ok": not late and broker["redis"]["ok"],
        "troubles": troubles,
        "scheduler": {
            "age_s": None if age_s is None else round(age_s, 1),
            "holder": row.holder if row else None,
        },
        **broker,
        "nodes": counts,
        "versions": {
            "release": versions.RELEASE,
            "wire": str(versions.WIRE),
            "nodes": skews,
        },
        "queue": {"waiting": Run.objects.filter(state=RunState.QUEUED).count()},
    }
