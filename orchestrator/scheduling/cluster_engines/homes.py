"""What a new job does in its engine's home, which no agent keeps in order.

Names supervisors of ended attempts, which may have been killed with unsent telemetry, and hands
deletions of garbage collection to the job. Does not decide what is deleted.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from redis.exceptions import RedisError

from orchestrator.common import clock
from orchestrator.common.redis import quick_client
from orchestrator.fleet.cluster_engines import kinds, members
from orchestrator.fleet.models import Engine, EngineMember, Node
from orchestrator.runs import storage
from orchestrator.runs.models import Attempt
from orchestrator.scheduling.models import EngineJob
from workers.contracts.wire.maintenance.storage import MOST_ITEMS, CollectOrder
from workers.contracts.wire.node_messages import AttemptState, LeftSupervisor

_MOST: Final = 50  # ended attempts of other runs
LATE: Final = members.LATE - timedelta(hours=1)  # their identities are valid for this long
_SCAN_EVERY_S: Final = 86400
_PREFIX: Final = "engine:"  # nodes have no such names


def run_dir(attempt: Attempt, node_rank: int) -> str:
    """The directory of a part of an attempt, relative to the engine's home."""
    return f"runs/{attempt.run_id}/attempt-{attempt.number}/node-{node_rank}"


def home_name(share: dict[str, Any]) -> str:
    """Who deletes files of a part of an attempt: its node, or jobs of its engine."""
    return f"{_PREFIX}{share['engine']}" if "engine" in share else str(share["node"])


def name_of_sender(sender: Node | EngineMember) -> str:
    """The home that a storage report is about."""
    return f"{_PREFIX}{sender.engine.name}" if isinstance(sender, EngineMember) else sender.name


def tasks(engine: Engine, attempt: Attempt) -> dict[str, Any]:
    """`left` and `collect` of the launch order of the attempt's first node."""
    own = _owner(engine, attempt)
    # homes of several users would overwrite each other's sizes
    scan = own is None and _claim_scan(engine)
    due = storage.deletions_due(node=f"{_PREFIX}{engine.name}", most=MOST_ITEMS, owner=own)
    collect = CollectOrder(
        checkpoints=[row.path for row in due if row.kind == "checkpoint"],
        attempts=[row.path for row in due if row.kind == "attempt"],
        scan=scan or (own is None and bool(due)),  # a deletion changes the sizes
    )
    return {"left": _left(engine, attempt, own), "collect": collect if due or scan else None}


def _claim_scan(engine: Engine) -> bool:
    """Whether this order scans the home, which one per `_SCAN_EVERY_S` does even without deletions.

    A scan reads every file, so the orders of many waiting jobs must not repeat it.
    """
    try:
        key = f"orrery:engine:{engine.pk}:scan"
        return bool(quick_client().set(key, "1", nx=True, ex=_SCAN_EVERY_S))
    except (RedisError, OSError):
        return False


def _owner(engine: Engine, attempt: Attempt) -> int | None:
    """The user whose home it is; None if all runs of the engine share one."""
    identity = getattr(kinds.settings_of(engine), "identity", "service")
    return attempt.run.owner_id if identity == "submitter" else None


def _left(engine: Engine, attempt: Attempt, owner: int | None) -> list[LeftSupervisor]:
    """Ended attempts of the run and of others in the same home, the run's own first.

    Only of ended jobs: after its report of the exit a supervisor runs for up to hours, and
    sends the rest itself.
    """
    jobs = EngineJob.objects.filter(
        engine=engine,
        state=EngineJob.State.ENDED,
        attempt__state=AttemptState.EXITED,
        attempt__ended__gt=clock.now() - LATE,
    ).exclude(hosts=[])
    if owner is not None:
        jobs = jobs.filter(attempt__run__owner=owner)
    jobs = jobs.select_related("attempt").order_by("-pk")
    own = list(jobs.filter(attempt__run=attempt.run_id)[:_MOST])
    others = list(jobs.exclude(attempt__run=attempt.run_id)[:_MOST])
    return [
        LeftSupervisor(node=share["node"], run_dir=run_dir(job.attempt, share["node_rank"]))
        for job in [*own, *others]
        for share in job.attempt.placement
    ]
