"""Creates and cancels sweeps. Checks the definition and its spec at the corners of the space."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, forbidden, invalid
from orchestrator.runs import services as runs
from orchestrator.runs.models import Experiment
from orchestrator.sweeps.definition import (
    Parameter,
    SweepDefinition,
    definition_problems,
    with_parameters,
)
from orchestrator.sweeps.models import Sweep, SweepState
from orchestrator.sweeps.trials import open_trials, trial_stop
from workers.contracts import Problem
from workers.contracts.base import as_sentences

NAME_LENGTH = 120


def sweep_create(
    *,
    owner: User,
    name: str,
    definition: SweepDefinition,
    experiment: Experiment | str | None = None,
) -> Sweep:
    """Store the sweep; its first runs start within seconds.

    Raises 422 `sweep-invalid` with one problem per wrong field: of the definition, or of the spec
    with the first and the last values of all parameters. 403 for viewers.
    """
    accounts.require_role(owner, Role.SUBMITTER, "start sweeps")
    name = name.strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise invalid(
            "name", f"a sweep's name has 1 to {NAME_LENGTH} characters", "Use a short name."
        )
    problems = definition_problems(definition) or _spec_problems(definition, by=owner)
    if problems:
        raise Refusal(
            "sweep-invalid",
            "The sweep cannot be started as it is",
            422,
            as_sentences(problems),
            problems,
        )
    with transaction.atomic():
        if isinstance(experiment, str):
            experiment = _experiment(experiment, owner)
        sweep = Sweep.objects.create(
            name=name,
            owner=owner,
            experiment=experiment,
            definition=definition.model_dump(mode="json", exclude_none=True),
            created=clock.now(),
        )
        data = {"name": name, "method": definition.method, "runs": definition.most_runs}
        accounts.audit(actor=owner, action="sweep.create", target=f"sweep:{sweep.pk}", data=data)
    return sweep


def sweep_cancel(*, sweep: Sweep, by: User) -> Sweep:
    """End the sweep and cancel its runs that have not ended. Cancelling twice has no effect.

    Raises 403 for users who are neither owner nor operator.
    """
    if not may_manage(sweep, by):
        raise forbidden(
            f"Sweep {sweep.pk} belongs to {sweep.owner.username}; its owner and operators can "
            "cancel it."
        )
    with transaction.atomic():
        running = Sweep.objects.filter(pk=sweep.pk, state=SweepState.RUNNING)
        message = f"Cancelled by {by.username}."
        ends = {"state": SweepState.CANCELLED, "message": message, "ended": clock.now()}
        if conditional.update(running, **ends):
            for trial in open_trials(sweep):
                trial_stop(trial, by=by, message="The sweep was cancelled.")
            accounts.audit(actor=by, action="sweep.cancel", target=f"sweep:{sweep.pk}")
    sweep.refresh_from_db()
    return sweep


def may_manage(sweep: Sweep, user: User) -> bool:
    """Whether the user may cancel the sweep: its owner as a submitter, and operators."""
    return at_least(user.role, Role.OPERATOR) or (
        sweep.owner_id == user.pk and at_least(user.role, Role.SUBMITTER)
    )


def _experiment(name: str, owner: User) -> Experiment | None:
    existing = Experiment.objects.filter(name=name.strip()).first()
    if existing is not None and existing.owner_id == owner.pk:
        return existing
    return runs.experiment_create(owner=owner, name=name)


def _spec_problems(definition: SweepDefinition, *, by: User) -> list[Problem]:
    """Problems of the spec at two corners: the first and the last value of every parameter."""
    problems: dict[str, Problem] = {}
    for end in (0, -1):
        values = {path: _corner(each, end) for path, each in definition.parameters.items()}
        try:
            spec = with_parameters(definition.spec, values)
        except ValueError as error:
            hint = "Write the object in the spec."
            return [Problem(field="parameters", message=str(error), hint=hint)]
        for item in runs.spec_problem_list(spec, by=by):
            field = _named(item["field"], values)
            problems.setdefault(
                field, Problem(field=field, message=item["message"], hint=item["hint"])
            )
    return list(problems.values())


def _named(field: str, values: dict[str, Any]) -> str:
    """`parameters.PATH` if the field of the spec is a parameter, else `spec.FIELD`."""
    if field in values:
        return f"parameters.{field}"
    for path in values:
        if field.startswith(f"{path}.") or path.startswith(f"{field}."):
            return f"parameters.{path}"
    return f"spec.{field}"


def _corner(parameter: Parameter, end: int) -> Any:
    if parameter.values is not None:
        return parameter.values[end]
    value = parameter.max if end else parameter.min
    assert value is not None
    return round(value) if parameter.integer else value
