"""What nodes get of a run's trials: plans, settings, and results of earlier attempts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from orchestrator.runs.models import Attempt
from orchestrator.runs.plan_trials.models import PlanTrials
from workers.contracts.exit_classes import ExitClass

# of attempts that ended without a fault of the plan that they tried
_ON_REQUEST = (ExitClass.CANCELLED, ExitClass.PREEMPTED, "")


def trials_order(attempt: Attempt) -> dict[str, Any] | None:
    """The data of `TrialsOrder`; None for a run without autotune or with a chosen plan.

    Times that other nodes measured are left out: they do not compare with those of this attempt.
    If every plan has failed, all are tried again.
    """
    run = attempt.run
    if not run.spec.get("autotune"):
        return None
    row = PlanTrials.objects.filter(run=run, decided=None).first()
    if row is None:
        return None
    settings, train = row.settings, run.spec["train"]
    here = sorted(share["node"] for share in attempt.placement)
    results = [
        result
        for result in row.results.values()
        if result["state"] == "failed" or sorted(row.nodes) == here
    ]
    failed = sum(result["state"] == "failed" for result in results)
    return {
        "candidates": [
            {
                "index": index,
                "plan": each["plan"],
                "step_time_s": each["prediction"]["step_time_s"],
            }
            for index, each in enumerate(row.candidates)
        ],
        "steps": settings["steps"],
        "warmup_steps": settings["warmup_steps"],
        "run_steps": train["steps"],
        "max_share": settings["max_share"],
        "max_seconds": settings.get("max_seconds"),
        "results": [] if failed == len(row.candidates) else results,
        "spent_s": row.spent_s,
        "interrupted": _interrupted(row, attempt),
    }


def _interrupted(row: PlanTrials, attempt: Attempt) -> dict[int, int]:
    """How many attempts ended, not on request, during a trial of each plan."""
    if not row.unfinished:
        return {}
    earlier = Attempt.objects.filter(run_id=row.run_id, number__lt=attempt.number)
    ended = dict(earlier.values_list("number", "exit_class"))
    return dict(
        Counter(
            int(index)
            for number, index in row.unfinished.items()
            if ended.get(int(number), "") not in _ON_REQUEST
        )
    )
