"""Running elastic runs as the policy would see them if they were queued to change their size.

One query for attempts and one for runs. Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings

from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling.placement import snapshot
from orchestrator.scheduling.placement.fair_shares import FairShares
from orchestrator.scheduling.placement.requests import QueuedRun
from orchestrator.scheduling.placement.resume_points import ResumePoint
from workers.contracts.wire.node_messages import AttemptState


@dataclass(frozen=True)
class ElasticRun:
    """An elastic run with an open attempt.

    `queued`: as it would be queued, to continue from a checkpoint of its last step.
    """

    attempt: int
    queued: QueuedRun
    devices: int  # that it holds now
    running: bool  # its ranks run, and it was not asked for anything
    started: datetime | None
    left_s: float | None  # measured time to its end at this size

    @property
    def slowdown(self) -> float:
        """Predicted step time at its size over that of the largest."""
        sizes = self.queued.smaller
        return next((size.slowdown for size in sizes if size.devices == self.devices), 1.0)


def open_runs(shares: FairShares) -> dict[int, ElasticRun]:
    """The elastic runs with an open attempt that may change their size.

    Leaves out those on several nodes unless run directories are shared: their checkpoint is split.
    """
    rows = Attempt.objects.exclude(state=AttemptState.EXITED).filter(run__sizes__isnull=False)
    rows_by_run = {
        run: (pk, state, requested, placement, started, step, eta_s)
        for pk, run, state, requested, placement, started, step, eta_s in rows.order_by(
            "pk"
        ).values_list(
            "pk",
            "run_id",
            "state",
            "requested",
            "placement",
            "started",
            "run__summary__step",
            "run__summary__eta_s",
        )
    }
    points, held = dict[int, ResumePoint](), dict[int, int]()
    for run, (_, _, _, placement, _, step, _) in rows_by_run.items():
        nodes = frozenset(share["node"] for share in placement)
        if settings.ENV.shared_runs or len(nodes) == 1:
            points[run] = ResumePoint("", int(step or 0), nodes)
            held[run] = sum(len(share["devices"]) for share in placement)
    views = snapshot.as_queued(Run.objects.filter(pk__in=points), points, shares)
    return {
        run: ElasticRun(
            rows_by_run[run][0],
            view,
            held[run],
            rows_by_run[run][1] == AttemptState.RUNNING and not rows_by_run[run][2],
            rows_by_run[run][4],
            rows_by_run[run][6],
        )
        for run, view in views.items()
    }
