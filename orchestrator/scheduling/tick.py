"""One pass of the scheduler: look, decide, place each gang in a short transaction, send its orders,
tell the rest.

Safe to run twice at once: an attempt is made by a conditional move, a device is held once by a
constraint.
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
class Pass:
    """What one tick did."""

    placed: tuple[Attempt, ...] = ()
    waiting: int = 0


def tick(*, now: datetime | None = None) -> Pass:
    """Places what can be placed and writes why the rest waits."""
    now = now or clock.now()
    seen = snapshot.take()
    if not seen.queue:
        return Pass()
    checkpoint_pins.keep_for(seen.runs.values())
    # people who ask get estimates; here only heads of line count
    decision = seen.decide(now, estimated=0)
    placed = []
    for placement in decision.placements:
        attempt = _placed(seen, placement)
        if attempt is not None:
            placed.append(attempt)
            dispatch.launch(attempt)
    changed = {
        wait.run: wait.reason
        for wait in decision.waits
        if seen.runs[wait.run].wait_reason != wait.reason[:300]
    }
    if changed:
        runs.wait_reasons_set(reasons=changed)
    return Pass(tuple(placed), len(decision.waits))


def _placed(seen: snapshot.Snapshot, placement: Placement) -> Attempt | None:
    """The new attempt with its allocations; None if the run or a device was gone meanwhile."""
    run = seen.runs[placement.run]
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
    point, left_behind = _resume(seen, run, frozenset(names))
    try:
        with transaction.atomic():
            attempt = runs.attempt_create(run=run, placement=shares, resume_from=point)
            if attempt is None:
                return None
            _allocate(attempt, shares, nodes)
            if left_behind is not None:
                runs.event_record(
                    run=run, type="checkpoint_left_behind", data=left_behind, attempt=attempt.number
                )
    except IntegrityError:
        log.info("Run %s was not placed: a device was taken meanwhile", run.pk)
        return None
    return attempt


def _allocate(attempt: Attempt, shares: list[dict[str, Any]], nodes: dict[str, Node]) -> None:
    held, rank = [], 0
    for share in shares:
        devices = dict(Device.objects.filter(node=nodes[share["node"]]).values_list("index", "pk"))
        for index in share["devices"]:
            held.append(
                Allocation(
                    attempt=attempt, device_id=devices[index], rank=rank, created=attempt.created
                )
            )
            rank += 1
    Allocation.objects.bulk_create(held)


def _resume(
    seen: snapshot.Snapshot, run: Run, names: frozenset[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`(resume_from, event data)`: the checkpoint, or word that it lies on nodes that this attempt
    does not get.
    """
    found = seen.resume.get(run.pk)
    if found is None:
        return None, None
    point, holders = found
    if settings.ENV.shared_runs or not holders or (holders == names and len(names) == 1):
        origin = checkpoint_pins.origin_of(run)
        fresh = origin is not None and origin[0].path == point["path"]
        return {
            **point,
            **({"source": origin[1].path} if origin is not None and fresh else {}),
        }, None
    where = ", ".join(sorted(holders))
    why = (
        f"lies in parts on {where}"
        if len(holders) > 1
        else f"lies on {where}, which this attempt does not run on"
    )
    message = (
        f"The checkpoint of step {point['step']} {why}; it starts from the beginning. "
        f"Share run directories (ORRERY_SHARED_RUNS) to resume anywhere."
    )
    return None, {"step": point["step"], "nodes": sorted(holders), "message": message}
