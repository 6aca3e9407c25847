"""Marks devices that gangs wait for, from the straggler events of running attempts.

A supervisor or rank reports a straggler when one rank is late in nearly all steps, compared with
its peers. Here the rank becomes a device. The mark goes when a later gang ran on it without one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.utils.dateparse import parse_datetime

from orchestrator.common import clock
from orchestrator.common.units import iso
from orchestrator.fleet import cordoning
from orchestrator.fleet.models import Cordon, Device
from orchestrator.fleet.services import publish
from orchestrator.runs import services as runs
from orchestrator.runs.models import RunEvent
from orchestrator.scheduling.models import Allocation

log = logging.getLogger(__name__)

OVERLAP: Final = timedelta(minutes=5)  # events read again; marking is idempotent
LEAST_S: Final = 60.0  # an attempt this long without a straggler clears the mark


def mark_slow(*, now: datetime | None = None) -> dict[str, int]:
    """Mark, cordon and clear devices; returns how many."""
    now = now or clock.now()
    marked = cordoned = 0
    for event, allocation in _stragglers(now - OVERLAP):
        device, data = allocation.device, _mark(event)
        if device is None:  # its node was removed
            continue
        known = device.slow or {}
        if (known.get("time") or "") >= data["time"]:
            continue
        data["runs"] = _runs_waiting_for(device, now)
        Device.objects.filter(pk=device.pk).update(slow=data)
        marked += 1
        cordoned += _cordon(device, event, data)
        publish(device.node)
    return {"marked": marked, "cordoned": cordoned, "cleared": _clear()}


def _stragglers(since: datetime) -> Iterator[tuple[RunEvent, Allocation]]:
    """Straggler events with the allocation of their rank, oldest first."""
    events = RunEvent.objects.filter(type="straggler", time__gte=since, rank__isnull=False)
    for event in events.select_related("run").order_by("time", "pk"):
        late = isinstance(event.data.get("late_s"), int | float)
        if not late or event.rank is None or event.attempt is None:
            continue  # a single stall, not a slow device
        allocation = (
            Allocation.objects.filter(
                attempt__run=event.run_id, attempt__number=event.attempt, rank=event.rank
            )
            .select_related("device__node")
            .first()
        )
        if allocation is not None:
            yield event, allocation


def _mark(event: RunEvent) -> dict[str, Any]:
    return {
        "time": iso(event.time),
        "run": str(event.run_id),
        "attempt": event.attempt,
        "rank": event.rank,
        "late_s": event.data["late_s"],
        "share": event.data.get("share"),
    }


def _runs_waiting_for(device: Device, now: datetime) -> int:
    """Runs of the window with a straggler event of their rank on this device."""
    since = now - timedelta(seconds=settings.ENV.cordon_window_s)
    rows = Allocation.objects.filter(device=device, attempt__run__events__type="straggler")
    return len(
        {
            run
            for run, number, rank in rows.filter(attempt__run__events__time__gte=since).values_list(
                "attempt__run_id", "attempt__number", "rank"
            )
            if RunEvent.objects.filter(
                run=run, attempt=number, rank=rank, type="straggler", time__gte=since
            ).exists()
        }
    )


def _cordon(device: Device, event: RunEvent, data: dict[str, Any]) -> bool:
    least = settings.ENV.cordon_slow_runs
    if not least or data["runs"] < least:
        return False
    reason = (
        f"{data['runs']} runs waited for device {device.index}; in run {data['run']} its rank was "
        f"{1000 * data['late_s']:.0f} ms late in nearly every step."
    )
    cordon = cordoning.cordon_create(
        node=device.node, device=device, cause=Cordon.Cause.SLOW, reason=reason, data=data
    )
    if cordon is None:
        return False
    log.warning("Device %s of %s is cordoned: %s", device.index, device.node.name, reason)
    runs.event_record(
        run=event.run,
        type="node_cordoned",
        data={"node": device.node.name, "device": device.index, "reason": reason},
        attempt=event.attempt,
        origin=f"cordon/{cordon.pk}",
    )
    return True


def _clear() -> int:
    """Remove the marks of devices on which a later gang ran without waiting for them."""
    cleared = 0
    for device in Device.objects.exclude(slow=None).select_related("node"):
        since = parse_datetime((device.slow or {}).get("time") or "")
        if since is None:
            continue
        later = Allocation.objects.filter(
            device=device, created__gt=since, released__isnull=False, attempt__run__devices__gt=1
        ).select_related("attempt")
        for allocation in later:
            attempt = allocation.attempt
            if attempt.started is None or attempt.ended is None:
                continue
            long = (attempt.ended - attempt.started).total_seconds() >= LEAST_S
            waited = RunEvent.objects.filter(
                run=attempt.run_id,
                attempt=attempt.number,
                rank=allocation.rank,
                type="straggler",
            ).exists()
            if long and not waited:
                Device.objects.filter(pk=device.pk).update(slow=None)
                publish(device.node)
                cleared += 1
                break
    return cleared
