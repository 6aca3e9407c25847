"""Combines reports of a hang over several nodes, because each node sees only its own ranks.

Collects for a few seconds, then records one event; a node without a report is the suspect. In
memory only: supervisors repeat their reports while the stall lasts. Does not end attempts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from workers.contracts.wire.rank_progress import RankProgress, describe_culprits, diagnose_stall

GATHER_S = 4.0  # nodes detect a stall within a second of each other


@dataclass
class PendingHang:
    """One stall of an attempt; `reports` are `{node: (progress of its ranks, quiet_s)}`."""

    attempt: Attempt
    since: float
    step: int
    reports: dict[str, tuple[list[RankProgress], float]] = field(default_factory=dict)


_pending: dict[str, PendingHang] = {}  # by fence


def collect(attempt: Attempt, *, node: str, data: Mapping[str, Any]) -> bool:
    """Collect one node's report of a hang over several nodes; False if `data` is not one."""
    standings = data.get("standings")
    if len(attempt.placement) < 2 or not isinstance(standings, list):
        return False
    try:
        ranks = [RankProgress.from_dict({**item, "node": node}) for item in standings]
    except (TypeError, ValueError, KeyError):
        return False
    if not ranks:
        return False
    step = min(rank.step for rank in ranks)
    fence = str(attempt.fence)
    hang = _pending.get(fence)
    if hang is None or hang.step != step:
        hang = _pending[fence] = PendingHang(attempt, time.monotonic(), step)
    hang.reports[node] = (ranks, float(data.get("quiet_s") or 0.0))
    if len(hang.reports) == len(attempt.placement):
        record(fence)
    return True


def record_due(*, now: float | None = None) -> None:
    """Record the hangs whose silent nodes have had `GATHER_S` to report."""
    now = time.monotonic() if now is None else now
    for fence in [fence for fence, hang in _pending.items() if now - hang.since > GATHER_S]:
        record(fence)


def record(fence: str) -> None:
    """Record the attempt's event `hang`, once per step."""
    hang = _pending.pop(fence)
    attempt, data = hang.attempt, hang_data(hang)
    runs.event_record(
        run=attempt.run,
        type="hang",
        data=data,
        attempt=attempt.number,
        rank=data.get("rank"),
        origin=f"{attempt.number}/hang/{hang.step}",
    )


def hang_data(hang: PendingHang) -> dict[str, Any]:
    """The event's data: silent nodes if there are any, otherwise the diagnosis of all ranks."""
    silent = sorted({share["node"] for share in hang.attempt.placement} - set(hang.reports))
    ranks = [rank for of_node, _ in hang.reports.values() for rank in of_node]
    quiet_s = max(quiet for _, quiet in hang.reports.values())
    data: dict[str, Any] = {"quiet_s": quiet_s, "step": hang.step}
    if silent:
        waiting = sorted(rank.rank for rank in ranks)
        message = f"no report from node {', '.join(silent)}; {len(waiting)} ranks on others wait"
        return {
            **data,
            "node": silent[0],
            "nodes": silent,
            "ranks": [],
            "waiting": waiting,
            "message": message,
        }
    diagnosis = diagnose_stall(ranks)
    data |= {
        "ranks": [rank.rank for rank in diagnosis.behind],
        "waiting": [rank.rank for rank in diagnosis.waiting],
    }
    if diagnosis.behind:
        first = diagnosis.behind[0]
        data |= {"rank": first.rank, "node": first.node, "stage": first.stage, "phase": first.phase}
        data |= {
            "step": first.step,
            "where": first.where,
            "nodes": sorted({rank.node for rank in diagnosis.behind}),
        }
    return {**data, "message": describe_culprits(diagnosis)}
