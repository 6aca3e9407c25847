"""A hang over several nodes: each tells how its own ranks stand, and only together do they show who
keeps the others.

Gathers for a few seconds, then tells it once as the run's event; a node that says nothing is itself
the suspect. In
memory only: supervisors repeat what they told while the stall lasts. Does not end anything;
patience is the nodes'.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt
from workers.contracts.wire.rank_progress import RankProgress, describe_culprits, diagnose_stall

GATHER_S = 4.0  # nodes notice within a second of each other


@dataclass
class Gathering:
    """What the nodes of one attempt told of one stall: `{node: (standings, quiet_s)}`."""

    attempt: Attempt
    since: float
    step: int
    told: dict[str, tuple[list[RankProgress], float]] = field(default_factory=dict)


_open: dict[str, Gathering] = {}  # by fence


def takes(attempt: Attempt, *, node: str, data: Mapping[str, Any]) -> bool:
    """Whether this is one node's part of a hang over several: then it is told with the others'
    parts.
    """
    given = data.get("standings")
    if len(attempt.placement) < 2 or not isinstance(given, list):
        return False
    try:
        standings = [RankProgress.from_dict({**each, "node": node}) for each in given]
    except (TypeError, ValueError, KeyError):
        return False
    if not standings:
        return False
    step = min(each.step for each in standings)
    fence = str(attempt.fence)
    gathering = _open.get(fence)
    if gathering is None or gathering.step != step:
        gathering = _open[fence] = Gathering(attempt, time.monotonic(), step)
    gathering.told[node] = (standings, float(data.get("quiet_s") or 0.0))
    if len(gathering.told) == len(attempt.placement):
        tell(fence)
    return True


def tell_due(*, now: float | None = None) -> None:
    """Tells those whose silent nodes had their time."""
    now = time.monotonic() if now is None else now
    for fence in [fence for fence, each in _open.items() if now - each.since > GATHER_S]:
        tell(fence)


def tell(fence: str) -> None:
    """The event `hang` of the whole attempt, once for each step it hangs in."""
    gathering = _open.pop(fence)
    attempt, data = gathering.attempt, judged(gathering)
    runs.event_record(
        run=attempt.run,
        type="hang",
        data=data,
        attempt=attempt.number,
        rank=data.get("rank"),
        origin=f"{attempt.number}/hang/{gathering.step}",
    )


def judged(gathering: Gathering) -> dict[str, Any]:
    """The event's data: from all standings; silent nodes come first."""
    silent = sorted({share["node"] for share in gathering.attempt.placement} - set(gathering.told))
    standings = [each for some, _ in gathering.told.values() for each in some]
    quiet_s = max(quiet for _, quiet in gathering.told.values())
    data: dict[str, Any] = {"quiet_s": quiet_s, "step": gathering.step}
    if silent:
        waiting = sorted(each.rank for each in standings)
        message = (
            f"nothing is told by node {', '.join(silent)}; {len(waiting)} ranks of the others wait"
        )
        return {
            **data,
            "node": silent[0],
            "nodes": silent,
            "ranks": [],
            "waiting": waiting,
            "message": message,
        }
    found = diagnose_stall(standings)
    data |= {
        "ranks": [each.rank for each in found.behind],
        "waiting": [each.rank for each in found.waiting],
    }
    if found.behind:
        first = found.behind[0]
        data |= {"rank": first.rank, "node": first.node, "stage": first.stage, "phase": first.phase}
        data |= {
            "step": first.step,
            "where": first.where,
            "nodes": sorted({each.node for each in found.behind}),
        }
    return {**data, "message": describe_culprits(found)}
