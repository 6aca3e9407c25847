"""Applies reports of trials: progress, results, and once the chosen plan of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction

from orchestrator.common import clock
from orchestrator.runs import events, parameters
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.plan_trials.models import PlanTrials
from orchestrator.runs.submission.prediction.whole_run import whole_run
from workers.contracts import ParallelPlan, RunSpec
from workers.contracts.wire.maintenance.plan_trials import CHOSEN, TRIAL, TRIAL_BEGAN, TrialResult

TRYING = "trying"  # key of a run's summary: {number, count} of the plan that is tried


def apply_event(*, attempt: Attempt, type: str, data: Mapping[str, Any], time: float) -> None:
    """Apply one report. Repeated ones, and those after a choice, change nothing.

    Raises ValueError, KeyError for data that are not valid.
    """
    with transaction.atomic():
        events.lock(attempt.run_id)
        row = PlanTrials.objects.filter(run_id=attempt.run_id, decided=None).first()
        run = Run.objects.get(pk=attempt.run_id)
        if row is None or run.attempt_number != attempt.number:
            return
        key = str(attempt.number)
        row.spent_s = max(row.spent_s, float(data.get("spent_s") or 0.0))
        began, _ = row.periods.get(key, [None, None])
        elapsed = max(0.0, float(data.get("elapsed_s") or 0.0))
        row.periods[key] = [time - elapsed if began is None else began, None]
        if type == TRIAL_BEGAN:
            _began(row, run, attempt, data)
        elif type == TRIAL:
            result = TrialResult.from_dict(data)
            _check(row, result.index)
            row.results[str(result.index)] = result.to_dict()
            row.unfinished.pop(key, None)
        elif type == CHOSEN:
            row.periods[key][1] = time
            row.unfinished.pop(key, None)
            _choose(row, run, data)
        row.save()


def _check(row: PlanTrials, index: int) -> None:
    if not 0 <= index < len(row.candidates):
        raise ValueError(f"the run has {len(row.candidates)} candidates, there is no {index}")


def _began(row: PlanTrials, run: Run, attempt: Attempt, data: Mapping[str, Any]) -> None:
    index = int(data["index"])
    _check(row, index)
    row.unfinished[str(attempt.number)] = index
    row.nodes = sorted(share["node"] for share in attempt.placement)
    trying = {"number": index + 1, "count": len(row.candidates), "again": bool(data.get("again"))}
    Run.objects.filter(pk=run.pk).update(summary={**run.summary, TRYING: trying})


def _choose(row: PlanTrials, run: Run, data: Mapping[str, Any]) -> None:
    index = int(data["index"])
    _check(row, index)
    results = [TrialResult.from_dict(each) for each in data.get("results") or []]
    row.results = {str(each.index): each.to_dict() for each in results}
    row.chosen, row.reason, row.decided = index, str(data.get("reason") or ""), clock.now()
    chosen = row.candidates[index]
    plan = ParallelPlan.from_dict(chosen["plan"]).to_dict()
    spec = RunSpec.from_dict(run.spec)
    prediction = dict(chosen["prediction"])
    prediction["whole_run"] = whole_run(prediction, spec, pool=run.pool_name, trials_s=row.spent_s)
    summary = {name: value for name, value in run.summary.items() if name != TRYING}
    Run.objects.filter(pk=run.pk).update(plan=plan, prediction=prediction, summary=summary)
    parameters.replace(run, "plan.", plan)
