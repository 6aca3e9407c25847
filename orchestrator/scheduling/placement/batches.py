"""Creates the attempts and allocations of placements, many in one short transaction.

If a device of a batch has been allocated concurrently, its placements are created one by one. Does
not decide anything and sends no orders.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, connection, transaction

from orchestrator.fleet.models import Device, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import checkpoint_pins
from orchestrator.scheduling.models import Allocation
from orchestrator.scheduling.placement.resume_points import ResumePoint
from orchestrator.scheduling.placement.snapshot import Snapshot
from orchestrator.scheduling.policy import Placement
from workers.contracts.specs.plan import ParallelPlan

log = logging.getLogger(__name__)

BATCH = 125  # placements per transaction
_ROWS = 2000  # per statement
_INSERT = (
    "INSERT INTO {table} (attempt_id, device_id, rank, created, node_name, pool_name)"
    " SELECT column1, column2, column3, %s, '', '' FROM (VALUES {values}) AS rows"
)


def split(placements: Sequence[Placement]) -> Iterator[Sequence[Placement]]:
    """Batches of at most `BATCH` placements."""
    for start in range(0, len(placements), BATCH):
        yield placements[start : start + BATCH]


def create(current: Snapshot, placements: Sequence[Placement]) -> list[Attempt]:
    """The new attempts; omits runs that are not queued and runs whose devices are not free."""
    names = {share.node for placement in placements for share in placement.shares}
    nodes = dict(Node.objects.filter(name__in=names).values_list("name", "address"))
    devices: dict[tuple[str, int], int] = {
        (node, index): pk
        for node, index, pk in Device.objects.filter(node__name__in=names).values_list(
            "node__name", "index", "pk"
        )
    }
    waiting = Run.objects.in_bulk([placement.run for placement in placements])
    new, lost = [], {}
    for placement in placements:
        run = waiting.get(placement.run)
        if run is None or not all(share.node in nodes for share in placement.shares):
            continue
        point, event = _resume(run, current.resume.get(run.pk), placement)
        shares = [
            {
                "node": share.node,
                "address": nodes[share.node],
                "devices": list(share.devices),
                "node_rank": number,
            }
            for number, share in enumerate(placement.shares)
        ]
        new.append(runs.NewAttempt(run, shares, point))
        if event is not None:
            lost[run.pk] = event
    try:
        return _create(new, devices, lost)
    except IntegrityError:
        if len(new) > 1:
            return [attempt for item in new for attempt in _create_one(item, devices, lost)]
        log.info("Run %s was not placed: a device has been allocated", new[0].run.pk)
        return []


def _create_one(
    item: runs.NewAttempt, devices: dict[tuple[str, int], int], lost: dict[int, dict[str, Any]]
) -> list[Attempt]:
    try:
        return _create([item], devices, lost)
    except IntegrityError:
        log.info("Run %s was not placed: a device has been allocated", item.run.pk)
        return []


def _create(
    new: Sequence[runs.NewAttempt],
    devices: dict[tuple[str, int], int],
    lost: dict[int, dict[str, Any]],
) -> list[Attempt]:
    with transaction.atomic():
        attempts = runs.attempts_create(new=new)
        _insert_allocations(
            (attempt, devices[where], rank)
            for attempt in attempts
            for rank, where in enumerate(
                (share["node"], index) for share in attempt.placement for index in share["devices"]
            )
        )
        for attempt in attempts:
            if attempt.run_id in lost:
                runs.event_record(
                    run=attempt.run,
                    type="checkpoint_left_behind",
                    data=lost[attempt.run_id],
                    attempt=attempt.number,
                )
        _record_sizes([attempt for attempt in attempts if attempt.run.sizes])
    return attempts


def _record_sizes(attempts: Sequence[Attempt]) -> None:
    """Record the events of elastic runs that continue on another number of devices than before."""
    if not attempts:
        return
    earlier = Attempt.objects.filter(run__in=[attempt.run_id for attempt in attempts])
    before = {(each.run_id, each.number): each for each in earlier}
    for attempt in attempts:
        last = before.get((attempt.run_id, attempt.number - 1))
        if last is None or last.devices == attempt.devices:
            continue
        plan = ParallelPlan.from_dict(attempt.plan or {})
        data: dict[str, Any] = {"from": last.devices, "to": attempt.devices, "dp": plan.dp}
        data["accumulation"] = plan.accumulation
        lost, request = (last.exit or {}).get("cause") == runs.NODE_LOST, last.resize or {}
        data["cause"] = runs.NODE_LOST if lost else request.get("cause")
        runs.event_record(run=attempt.run, type="resized", data=data, attempt=attempt.number)


def _insert_allocations(rows: Iterable[tuple[Attempt, int, int]]) -> None:
    """Insert `(attempt, device, rank)`; raises IntegrityError if a device is allocated already.

    `bulk_create` takes three times as long, because it converts the constant columns of each row.
    """
    by_time: dict[datetime, list[str]] = {}
    for attempt, device, rank in rows:
        by_time.setdefault(attempt.created, []).append(f"({attempt.pk:d},{device:d},{rank:d})")
    with connection.cursor() as cursor:
        for created, values in by_time.items():
            time = connection.ops.adapt_datetimefield_value(created)
            for start in range(0, len(values), _ROWS):
                some = ",".join(values[start : start + _ROWS])
                # %s is the only text; the values are integers
                cursor.execute(_INSERT.format(table=Allocation._meta.db_table, values=some), [time])


def _resume(
    run: Run, point: ResumePoint | None, placement: Placement
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`(resume_from, None)`, or `(None, event data)` if other nodes store the checkpoint."""
    if point is None:
        return None, None
    names, holders = {share.node for share in placement.shares}, point.nodes
    readable = point.stored and len(names) == 1
    if (
        settings.ENV.shared_runs
        or not holders
        or readable
        or (holders == names and len(names) == 1)
    ):
        resume = point.resume_from
        origin = checkpoint_pins.fork_checkpoint(run)
        if origin is not None and origin[0].path == point.path:
            resume["source"] = origin[1].path
        return resume, None
    where = ", ".join(sorted(holders))
    why = (
        f"is split over {where}"
        if len(holders) > 1
        else f"is stored on {where}, which is lost, drained, cordoned or too small for this run"
    )
    message = (
        f"The checkpoint of step {point.step} {why}; the attempt starts from the beginning. "
        f"Share run directories (ORRERY_SHARED_RUNS) or set ORRERY_STORE_URL to resume on any node."
    )
    return None, {"step": point.step, "nodes": sorted(holders), "message": message}
