"""What a supervisor tells of ranks that stand or lag: events `hang` and `straggler`, and the
verdict `hang`. Pure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from workers.contracts.wire.rank_progress import (
    RankProgress,
    StallDiagnosis,
    describe_culprits,
    diagnose_stall,
)
from workers.launcher.exit_verdict import Verdict
from workers.launcher.hangs.rank_watch import Late, Over, Stall, named


def event(
    news: Stall | Late | Over | None, *, nodes: int, ends_after_s: float
) -> dict[str, Any] | None:
    """The report's `{type, rank?, data}`, or None where there is nothing to tell."""
    if isinstance(news, Stall):
        if news.again and nodes == 1:
            return None  # told, and nothing new; of several nodes, one may not have been heard
        found = hang(news.standings, news.quiet_s, nodes=nodes, judgement=news.judgement)
        found["data"] |= {"limit_s": round(news.limit_s, 1), "ends_after_s": ends_after_s}
        return found
    if isinstance(news, Late):
        share = f"{news.share:.0%} of the time the others wait for it"
        message = f"{share}; it comes {1000 * news.mean_s:.0f} ms after them"
        data = {
            **named(news.standing),
            "share": round(news.share, 3),
            "late_s": round(news.mean_s, 4),
            "message": message,
        }
        return {"type": "straggler", "rank": news.standing.rank, "data": data}
    if isinstance(news, Over):
        first = news.judgement.behind[0] if news.judgement.behind else None
        held = (
            f"held the others for {news.quiet_s:.0f} s"
            if first
            else f"nothing moved for {news.quiet_s:.0f} s"
        )
        data = {
            **(named(first) if first else {}),
            "held_s": round(news.quiet_s, 1),
            "message": f"{held}; it goes on",
        }
        return {"type": "straggler", "rank": first.rank if first else None, "data": data}
    return None


def hang(
    standings: Sequence[RankProgress], quiet_s: float, *, nodes: int, judgement: StallDiagnosis | None = None
) -> dict[str, Any]:
    """The event of ranks that stand.

    From several nodes it carries all that the control plane judges by.
    """
    found = judgement or diagnose_stall(standings)
    first = found.behind[0] if found.behind else None
    data: dict[str, Any] = {
        "quiet_s": round(quiet_s, 1),
        "ranks": [each.rank for each in found.behind],
        "waiting": [each.rank for each in found.waiting],
        "message": describe_culprits(found),
        **(
            named(first)
            if first
            else {"step": max((each.step for each in standings), default=None)}
        ),
    }
    if nodes > 1:
        data["standings"] = [each.to_dict() for each in standings]
    return {"type": "hang", "rank": first.rank if first else None, "data": data}


def verdict(standings: Sequence[RankProgress], quiet_s: float) -> Verdict:
    """The attempt's end after patience ran out; without standings, for a program that shows no
    progress.
    """
    stacks = "stacks of all ranks are in their stderr logs"
    if not standings:
        return Verdict(
            "hang", f"No rank wrote a point for {quiet_s:.0f} s; {stacks}.", time=time.time()
        )
    found = diagnose_stall(standings)
    message = f"No rank moved for {quiet_s:.0f} s: {describe_culprits(found)}; {stacks}."
    first = found.behind[0] if found.behind else None
    step = min(each.step for each in standings)
    return Verdict("hang", message, rank=first.rank if first else None, step=step, time=time.time())
