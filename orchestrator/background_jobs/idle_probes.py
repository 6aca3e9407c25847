"""Requests full probes of idle nodes, so that predictions rest on measurements of each node.

One node per pool at a time, and none in a pool whose runs wait. A run that starts on the node ends
its probe.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from django.conf import settings
from django.db.models import Exists, OuterRef, Q

from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.fleet import node_probes
from orchestrator.fleet.models import Cordon, Node, NodeProbe
from orchestrator.runs.models import Run
from orchestrator.scheduling import services as scheduling
from orchestrator.scheduling.models import Allocation
from workers.contracts.wire.maintenance.node_probe import VERSION
from workers.contracts.wire.node_messages import RunState

log = logging.getLogger(__name__)

AGAIN: Final = timedelta(hours=1)  # after a probe that was refused or interrupted


def probe_idle(*, now: datetime | None = None) -> dict[str, int]:
    """Request the probes that are due; returns how many."""
    now = now or clock.now()
    idle_s = settings.ENV.idle_probe_s
    if not idle_s:
        return {}
    node_probes.overdue_fail()
    requested = 0
    probing = set(
        NodeProbe.objects.filter(state=NodeProbe.State.REQUESTED).values_list(
            "node__pool", flat=True
        )
    )
    for node in _due(now, timedelta(seconds=idle_s)):
        if node.pool_id in probing:
            continue
        try:
            scheduling.node_probe(node=node, by=None)
        except Refusal as refusal:
            log.info("No probe of the idle node %s: %s", node.name, refusal)
            continue
        probing.add(node.pool_id)
        requested += 1
    return {"requested": requested} if requested else {}


def _due(now: datetime, idle: timedelta) -> Iterator[Node]:
    """Idle nodes without a recent full probe; those that were never probed first."""
    waiting = Run.objects.filter(state=RunState.QUEUED).values("pool_name")
    held = Allocation.objects.filter(device__node=OuterRef("pk")).filter(
        Q(released=None) | Q(released__gt=now - idle)
    )
    cordons = Cordon.objects.filter(node=OuterRef("pk"), lifted=None)
    days = timedelta(days=settings.ENV.idle_probe_days)
    recent = NodeProbe.objects.filter(
        node=OuterRef("pk"), time__gt=now - days, report__short=False, report__version=VERSION
    )
    tried = NodeProbe.objects.filter(node=OuterRef("pk"), requested__gt=now - AGAIN).exclude(
        state=NodeProbe.State.DONE
    )
    nodes = (
        Node.objects.filter(
            health=Node.Health.UP, drained=False, joined__lt=now - idle, pool__engine=None
        )
        .exclude(pool__name__in=waiting)
        .exclude(Exists(held) | Exists(cordons) | Exists(recent) | Exists(tried))
        .select_related("pool")
    )
    ever = NodeProbe.objects.filter(node=OuterRef("pk")).exclude(time=None)
    yield from nodes.annotate(probed=Exists(ever)).order_by("probed", "pk")
