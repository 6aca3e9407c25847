"""A fingerprint of all inputs of a pass except the time: while it is equal, so is the decision.

Aggregates in the database, so an idle pass costs little. Does not depend on the policy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.conf import settings
from django.db.models import Count, Max, Q, QuerySet, Sum

from orchestrator.accounts.models import Team
from orchestrator.common import clock
from orchestrator.fleet.cordons import has_open_cordon, usable_devices
from orchestrator.fleet.models import Node, Pool
from orchestrator.runs.models import Checkpoint, Run
from orchestrator.runs.outputs import produce_servers
from orchestrator.scheduling.models import Allocation, TeamGuarantee
from workers.contracts.wire.node_messages import RunState


class Queue(NamedTuple):
    """Number and priorities of the waiting runs, and when the last one entered the queue."""

    runs: int
    priorities: int
    entered: datetime | None

    def without(self, priorities: Sequence[int]) -> Queue:
        """The queue after runs of these priorities have left it.

        It differs from the current one after any other change, because each run that enters is
        the last to do so.
        """
        return Queue(self.runs - len(priorities), self.priorities - sum(priorities), self.entered)


class Inputs(NamedTuple):
    """The number of waiting runs, the fingerprint, and that of nodes, devices and pools alone."""

    waiting: int
    fingerprint: str
    fleet: str = ""
    queue: Queue = Queue(0, 0, None)


def read() -> Inputs:
    """Read the fingerprint of the queue and the fleet.

    Every change of a waiting run raises its version, moves `queued_at` or changes a sum.
    """
    queue = own_queue().aggregate(
        runs=Count("pk"),
        newest=Max("pk"),
        ids=Sum("pk"),
        queued=Max("queued_at"),
        versions=Sum("version"),
        priorities=Sum("priority"),
        delayed=Count("not_before"),
        delayed_until=Max("not_before"),
        clients=Count("pk", filter=produce_servers.MAY_NAME_SERVERS),
    )
    if not queue["runs"]:
        return Inputs(0, "")
    facts: list[Any] = [settings.ENV.shared_runs, sorted(queue.items())]
    if queue["clients"]:  # they may wait for a server
        facts.append(produce_servers.phases(produce_servers.waited_for()))
    facts.append(
        Allocation.objects.filter(released=None).aggregate(
            Count("pk"), Max("pk"), Sum("pk"), Sum("device_id")
        )
    )
    facts.append(
        Checkpoint.objects.filter(run__state=RunState.QUEUED, deleted=None).aggregate(
            Count("pk"), Max("pk"), Sum("pk")
        )
    )
    fleet: list[Any] = [
        usable_devices().aggregate(
            Count("pk"), Max("pk"), Sum("pk"), Sum("index"), Count("catalogue", distinct=True)
        ),
        list(_pools().values_list()),
        list(
            Team.objects.order_by("pk", "members").values_list(
                "name", "max_devices", "share", "members"
            )
        ),
        list(TeamGuarantee.objects.order_by("pk").values_list("pool", "team", "devices")),
        list(
            Node.objects.order_by("pk").values_list(
                "pk", "pool_id", "health", "drained", "wire", "topology", has_open_cordon("node")
            )
        ),
    ]
    waiting = Queue(queue["runs"], queue["priorities"], queue["queued"])
    return Inputs(queue["runs"], _digest([facts, fleet]), _digest(fleet), waiting)


def _pools() -> QuerySet[Pool]:
    """The pools with their present and future windows, which never change after their creation."""
    coming = Q(windows__end__gt=clock.now())
    return Pool.objects.order_by("pk").annotate(
        coming=Count("windows", filter=coming), coming_ids=Sum("windows__pk", filter=coming)
    )


def own_queue() -> QuerySet[Run]:
    """Queued runs that this scheduler places itself; engines have queues of their own."""
    pools = Pool.objects.filter(engine__isnull=False).values("name")
    return Run.objects.filter(state=RunState.QUEUED).exclude(pool_name__in=pools)


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
