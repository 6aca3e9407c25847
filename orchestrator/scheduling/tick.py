"""One scheduling pass: read, decide, place each gang in a short transaction, send its orders.

Safe to run concurrently: a conditional update creates an attempt once, and a constraint lets a
device be held once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from orchestrator.common import clock
from orchestrator.fleet.models import Device, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import checkpoint_pins, dispatch
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.placement import snapshot
from orchestrator.scheduling.policy import Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TickResult:
    """Attempts placed by one tick, and the number of runs that wait."""

    placed: tuple[Attempt, ...] = ()
    waiting: int = 0


def tick(*, now: datetime | None = None) -> TickResult:
    """Place the runs that fit, and store the reasons of those that wait."""
    now = now or clock.now()
    current = snapshot.take()
    if not current.queue:
        return TickResult()
    checkpoint_pins.pin_for_forks(current.runs.values())
    # pages compute estimates; a pass only needs reservations
    decision = current.decide(now, estimated=0)
    placed = []
    for placement in decision.placements:
        attempt = _create_attempt(current, placement)
        if attempt is not None:
            placed.append(attempt)
            dispatch.launch(attempt)
    changed = {
        wait.run: wait.reason
        for wait in decision.waits
        if current.runs[wait.run].wait_reason != wait.reason[:300]
    }
    if changed:
        runs.wait_reasons_set(reasons=changed)
    return TickResult(tuple(placed), len(decision.waits))


def _create_attempt(current: snapshot.Snapshot, placement: Placement) -> Attempt | None:
    """Create an attempt with its allocations; None if the run or a device is no longer free."""
    run = current.runs[placement.run]
    names = [share.node for share in placement.shares]
    nodes = {node.name: node for node in Node.objects.filter(name__in=names)}
    if len(nodes) < len(names):
        return None
    shares: list[dict[str, Any]] = [
        {
            "node": share.node,
            "address": nodes[share.node].address,
            "devices": list(share.devices),
            "node_rank": number,
        }
        for number, share in enumerate(placement.shares)
    ]
    point, unreachable = _resume(current, run, frozenset(names))
    try:
        with transaction.atomic():
            attempt = runs.attempt_create(run=run, placement=shares, resume_from=point)
            if attempt is None:
                return None
            _allocate(attempt, shares, nodes)
            if unreachable is not None:
                runs.event_record(
                    run=run, type="checkpoint_left_behind", data=unreachable, attempt=attempt.number
                )
    except IntegrityError:
        log.info("Run %s was not placed: a device has been allocated concurrently", run.pk)
        return None
    return attempt


def _allocate(attempt: Attempt, shares: list[dict[str, Any]], nodes: dict[str, Node]) -> None:
    allocations, rank = [], 0
    for share in shares:
        devices = dict(Device.objects.filter(node=nodes[share["node"]]).values_list("index", "pk"))
        for index in share["devices"]:
            allocations.append(
                Allocation(
                    attempt=attempt, device_id=devices[index], rank=rank, created=attempt.created
                )
            )
            rank += 1
    Allocation.objects.bulk_create(allocations)


def _resume(
    current: snapshot.Snapshot, run: Run, names: frozenset[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`(resume_from, None)`, or `(None, event data)` if other nodes store the checkpoint."""
    checkpoint = current.resume.get(run.pk)
    if checkpoint is None:
        return None, None
    point, holders = checkpoint
    if settings.ENV.shared_runs or not holders or (holders == names and len(names) == 1):
        origin = checkpoint_pins.fork_checkpoint(run)
        if origin is not None and origin[0].path == point["path"]:
            point = {**point, "source": origin[1].path}
        return {**point}, None
    where = ", ".join(sorted(holders))
    why = (
        f"is split over {where}"
        if len(holders) > 1
        else f"is stored on {where}, where this attempt does not run"
    )
    message = (
        f"The checkpoint of step {point['step']} {why}; the attempt starts from the beginning. "
        f"Share run directories (ORRERY_SHARED_RUNS) to resume on any node."
    )
    return None, {"step": point["step"], "nodes": sorted(holders), "message": message}
