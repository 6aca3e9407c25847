"""Events `hang` and `straggler` of a supervisor, and the verdict `hang`. Pure."""

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
from workers.launcher.exits.classification import Verdict
from workers.launcher.hangs.hang_detector import Stall, StallOver, Straggler, event_fields

PATIENT_FACTOR = 3.0  # for loading, compiling, first steps, saving, validation


def limit_s(hang_s: float, *, in_step: bool) -> float:
    """Seconds without progress after which the supervisor ends the attempt, and which it announces.

    `in_step`: the ranks compute a step whose duration is known.
    """
    return hang_s if in_step else PATIENT_FACTOR * hang_s


def event(
    observation: Stall | Straggler | StallOver | None, *, nodes: int, ends_after_s: float
) -> dict[str, Any] | None:
    """The report's `{type, rank?, data}`, or None if there is nothing new."""
    if isinstance(observation, Stall):
        stall = observation
        if stall.repeated and nodes == 1:
            return None  # with several nodes, another node's report may have been lost
        report = hang(stall.rank_progress, stall.quiet_s, nodes=nodes, diagnosis=stall.diagnosis)
        report["data"] |= {"limit_s": round(stall.limit_s, 1), "ends_after_s": ends_after_s}
        return report
    if isinstance(observation, Straggler):
        share = f"{observation.share:.0%} of the time the others wait for it"
        message = f"{share}; it arrives {1000 * observation.mean_s:.0f} ms after them"
        data = {
            **event_fields(observation.progress),
            "share": round(observation.share, 3),
            "late_s": round(observation.mean_s, 4),
            "message": message,
        }
        return {"type": "straggler", "rank": observation.progress.rank, "data": data}
    if isinstance(observation, StallOver):
        behind = observation.diagnosis.behind
        first = behind[0] if behind else None
        held = (
            f"blocked the others for {observation.quiet_s:.0f} s"
            if first
            else f"no progress for {observation.quiet_s:.0f} s"
        )
        data = {
            **(event_fields(first) if first else {}),
            "held_s": round(observation.quiet_s, 1),
            "message": f"{held}; it continues",
        }
        return {"type": "straggler", "rank": first.rank if first else None, "data": data}
    return None


def hang(
    rank_progress: Sequence[RankProgress],
    quiet_s: float,
    *,
    nodes: int,
    diagnosis: StallDiagnosis | None = None,
) -> dict[str, Any]:
    """The event of stalled ranks; with several nodes it includes the progress of all ranks, by
    which
    the control plane finds the culprit.
    """
    diagnosis = diagnosis or diagnose_stall(rank_progress)
    first = diagnosis.behind[0] if diagnosis.behind else None
    data: dict[str, Any] = {
        "quiet_s": round(quiet_s, 1),
        "ranks": [progress.rank for progress in diagnosis.behind],
        "waiting": [progress.rank for progress in diagnosis.waiting],
        "message": describe_culprits(diagnosis),
        **(
            event_fields(first)
            if first
            else {"step": max((progress.step for progress in rank_progress), default=None)}
        ),
    }
    if nodes > 1:
        data["standings"] = [progress.to_dict() for progress in rank_progress]
    return {"type": "hang", "rank": first.rank if first else None, "data": data}


def verdict(rank_progress: Sequence[RankProgress], quiet_s: float) -> Verdict:
    """The verdict of a hang; `rank_progress` is empty for a program without beacons."""
    stacks = "stacks of all ranks are in their stderr logs"
    if not rank_progress:
        return Verdict(
            "hang", f"No rank wrote a point for {quiet_s:.0f} s; {stacks}.", time=time.time()
        )
    diagnosis = diagnose_stall(rank_progress)
    culprits = describe_culprits(diagnosis)
    message = f"No rank made progress for {quiet_s:.0f} s: {culprits}; {stacks}."
    first = diagnosis.behind[0] if diagnosis.behind else None
    step = min(progress.step for progress in rank_progress)
    return Verdict("hang", message, rank=first.rank if first else None, step=step, time=time.time())
