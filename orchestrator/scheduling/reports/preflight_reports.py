"""Stores what a node measured before an attempt and cordons what is below its record.

A device that fails alone is cordoned; the node if several fail or its own all-reduce is slow. A
slow all-reduce over several nodes names no node, so it cordons none: the links between them are
suspected (`fleet.suspect_links`). Does not judge rates.
"""

from __future__ import annotations

import logging

from django.db import transaction

from orchestrator.fleet import cordoning, probe_history
from orchestrator.fleet.models import Cordon, Device, Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from workers.contracts.wire.maintenance.preflight import PreflightReport, Shortfall

log = logging.getLogger(__name__)

_NODE = "all_reduce_node"


def apply(attempt: Attempt, *, node: Node, report: PreflightReport) -> Cordon | None:
    """Store the rates; the new cordon, if the report requires one. Idempotent."""
    with transaction.atomic():
        probe_history.record(node=node, run=attempt.run_id, attempt=attempt.number, report=report)
        faults = [
            item for item in report.shortfalls if item.device is not None or item.measure == _NODE
        ]
        if not faults:
            return None
        device = _device(node, faults)
        reason = "Preflight: " + "; ".join(item.message for item in faults)
        cordon = cordoning.cordon_create(
            node=node,
            device=device,
            cause=Cordon.Cause.PREFLIGHT,
            reason=reason,
            data={"shortfalls": [item.to_dict() for item in faults]},
        )
        if cordon is None:
            return None
        log.warning("%s is cordoned: %s", node.name, reason)
        runs.event_record(
            run=attempt.run,
            type="node_cordoned",
            data={
                "node": node.name,
                "device": device.index if device else None,
                "reason": cordon.reason,
            },
            attempt=attempt.number,
            origin=f"cordon/{cordon.pk}",
        )
    return cordon


def _device(node: Node, faults: list[Shortfall]) -> Device | None:
    """The only device at fault; None: the whole node."""
    indices = {item.device for item in faults}
    index = indices.pop()
    if indices or index is None:
        return None
    return Device.objects.filter(node=node, index=index).first()
