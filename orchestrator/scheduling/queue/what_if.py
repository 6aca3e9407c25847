"""What the live queue would do after a change: estimated starts before and after it.

Simulates with the scheduler's own decision for at most `BUDGET_S` each. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role
from orchestrator.accounts.services import require_role
from orchestrator.common import clock
from orchestrator.common.errors import invalid
from orchestrator.fleet.models import Pool
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling.placement import snapshot
from orchestrator.scheduling.policy import QueuedRun
from orchestrator.scheduling.queue import start_estimates
from orchestrator.scheduling.simulation import estimates
from orchestrator.scheduling.simulation.what_if import Change, applied

BUDGET_S: Final = 1.0
SAMPLES: Final = 3
MOST_NODES: Final = 1000
SHOWN: Final = 50


@dataclass(frozen=True)
class Row:
    """A waiting run; seconds until its estimated start, None if unknown or not in the queue."""

    run: Run
    before_s: float | None
    after_s: float | None


@dataclass(frozen=True)
class Result:
    """The first waiting runs in order, and sums over those with an estimate before and after.

    `compared` runs wait for `before_s` and `after_s` on average; `starting` of all start at once
    after the change.
    """

    change: Change
    rows: list[Row]
    waiting: int
    compared: int
    before_s: float | None
    after_s: float | None
    starting: int


def what_if(*, by: User, change: Change) -> Result:
    """Compare the queue as it is with the queue after the change. Raises 403 and 422."""
    require_role(by, Role.OPERATOR, "simulate changes of the live queue")
    _require_possible(change)
    current, now = snapshot.take(), clock.now()
    time = now.timestamp()
    nodes = current.nodes or snapshot.node_views(current.shares)
    try:
        queue, views = applied(change, current.queue, nodes)
    except ValueError:
        raise invalid(
            "pool", f"pool {change.pool} has no node to copy", "Use a pool with a node."
        ) from None
    policy = start_estimates.policy_of(current)
    ends, recent = start_estimates.ends(time), start_estimates.recent(now)
    results = [
        estimates.estimate_starts(
            each,
            fleet,
            time,
            policy=policy,
            ends=ends,
            recent=arrivals,
            samples=SAMPLES,
            budget_s=BUDGET_S,
        )
        for each, fleet, arrivals in (
            (current.queue, nodes, recent),
            (queue, views, without_team(recent, current, change.pause_team)),
        )
    ]
    before, after = (
        {run: max(0.0, estimate.start - time) for run, estimate in each.items()} for each in results
    )
    ordered = [run.run for run in policy.first(current.queue, nodes, time)]
    shown = runs.waiting_runs(ids=ordered[:SHOWN])
    both = before.keys() & after.keys()
    return Result(
        change,
        [Row(shown[run], before.get(run), after.get(run)) for run in ordered if run in shown],
        len(current.queue),
        len(both),
        sum(before[run] for run in both) / len(both) if both else None,
        sum(after[run] for run in both) / len(both) if both else None,
        sum(wait < 1.0 for wait in after.values()),
    )


def without_team(
    recent: Sequence[QueuedRun], current: snapshot.Snapshot, team: str
) -> list[QueuedRun]:
    """The runs of other teams; all if `team` is empty."""
    return [run for run in recent if not team or current.shares.team(run.owner) != team]


def _require_possible(change: Change) -> None:
    if not change.add_nodes and not change.pause_team:
        raise invalid("add_nodes", "nothing changes", "Use a number of nodes, or a team to pause.")
    if not 0 <= change.add_nodes <= MOST_NODES:
        raise invalid("add_nodes", f"{change.add_nodes} nodes", f"Use 0 to {MOST_NODES}.")
    if change.add_nodes:
        pool = Pool.objects.filter(name=change.pool).first()
        if pool is None:
            raise invalid(
                "pool", f"there is no pool {change.pool[:80]!r}", "Use the name of a pool."
            )
        if pool.engine_id is not None:
            message = f"the engine of pool {pool.name} schedules its runs"
            raise invalid("pool", message, "Use a pool of Orrery's own nodes.")
    if change.pause_team and not Team.objects.filter(name=change.pause_team).exists():
        raise invalid(
            "pause_team", f"there is no team {change.pause_team[:80]!r}", "Use the name of a team."
        )
