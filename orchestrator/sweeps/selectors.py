"""Reads sweeps with their trials, best results and the importance of parameters."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import iso
from orchestrator.runs.models import Run
from orchestrator.sweeps import bayesian
from orchestrator.sweeps.advance import best_trial, device_hours, observed
from orchestrator.sweeps.definition import SweepDefinition
from orchestrator.sweeps.models import Sweep, Trial
from orchestrator.sweeps.services import may_manage
from orchestrator.sweeps.trials import OPEN

__all__ = ["device_hours", "may_manage"]


def sweeps_visible_to(*, user: User) -> QuerySet[Sweep]:
    """Sweeps of the user and of their teams, newest first."""
    owners = people.visible_owners(user)
    rows = Sweep.objects.select_related("owner", "experiment").annotate(count=Count("trials"))
    return (rows if owners is None else rows.filter(owner_id__in=owners)).order_by("-id")


def sweep_get(*, user: User, id: int) -> Sweep:
    """The sweep with this id; Refusal 404 if the user may not see it."""
    sweep = sweeps_visible_to(user=user).filter(pk=id).first()
    if sweep is None:
        raise missing_object("sweep", id)
    return sweep


def trials_of(sweep: Sweep) -> list[Trial]:
    """The sweep's trials with their runs, by number."""
    return list(sweep.trials.select_related("run", "parent").order_by("number"))


def trial_of(run: Run) -> Trial | None:
    """The trial that the run measures, with its sweep; None outside sweeps."""
    return Trial.objects.filter(run=run).select_related("sweep").first()


def definition_of(sweep: Sweep) -> SweepDefinition:
    """The stored definition."""
    return SweepDefinition.from_dict(sweep.definition)


def best_of(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """The best trial so far."""
    return best_trial(trials, minimize=definition_of(sweep).metric.goal == "minimize")


def importance_of(sweep: Sweep, trials: list[Trial]) -> dict[str, float]:
    """Share of each parameter in reaching good values (`bayesian.IMPORTANCE_METHOD`)."""
    definition = definition_of(sweep)
    done = [trial for trial in trials if trial.state not in OPEN]
    return bayesian.importance(
        definition.parameters,
        observed(done),
        minimize=definition.metric.goal == "minimize",
    )


def serialize_sweep(sweep: Sweep) -> dict[str, Any]:
    """A sweep without its trials."""
    definition = definition_of(sweep)
    return {
        "id": str(sweep.pk),
        "name": sweep.name,
        "owner": sweep.owner.username,
        "experiment": sweep.experiment.name if sweep.experiment else None,
        "state": sweep.state,
        "message": sweep.message,
        "method": definition.method,
        "metric": definition.metric.to_dict(),
        "budget": {"runs": definition.most_runs, "device_hours": definition.budget.device_hours},
        "created": iso(sweep.created),
        "ended": iso(sweep.ended),
    }


def serialize_sweep_with_trials(sweep: Sweep) -> dict[str, Any]:
    """A sweep with its definition, trials, best trial, used budget and importance."""
    trials = trials_of(sweep)
    best = best_of(sweep, trials)
    return {
        **serialize_sweep(sweep),
        "definition": sweep.definition,
        "used": {
            "runs": sum(trial.run_id is not None for trial in trials),
            "device_hours": round(device_hours(sweep), 4),
        },
        "best": serialize_trial(best) if best is not None else None,
        "importance": {
            "method": bayesian.IMPORTANCE_METHOD,
            "shares": importance_of(sweep, trials),
        },
        "trials": [serialize_trial(trial) for trial in trials],
    }


def serialize_trial(trial: Trial) -> dict[str, Any]:
    """A trial; `parent` is the number of the trial that a fork continues."""
    return {
        "number": trial.number,
        "run": str(trial.run_id) if trial.run_id is not None else None,
        "run_state": trial.run.state if trial.run is not None else None,
        "parent": trial.parent.number if trial.parent is not None else None,
        "parameters": dict(sorted(trial.parameters.items())),
        "state": trial.state,
        "message": trial.message,
        "value": trial.value,
        "step": trial.step,
        "results": trial.results,
        "created": iso(trial.created),
        "ended": iso(trial.ended),
    }
