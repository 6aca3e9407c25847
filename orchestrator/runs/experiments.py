"""Creates and edits experiments: questions and the runs that answer them."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.runs.models import Experiment


def experiment_create(
    *, owner: User, name: str, hypothesis: str = "", notes: str = "", pinned: Sequence[str] = ()
) -> Experiment:
    """Create an experiment. Names are unique: 409 for one that exists."""
    accounts.require_role(owner, Role.SUBMITTER, "create experiments")
    name = checked_name(name)
    try:
        with transaction.atomic():
            experiment = Experiment.objects.create(
                name=name,
                owner=owner,
                hypothesis=hypothesis,
                notes=notes,
                pinned=list(pinned),
                created=clock.now(),
            )
            accounts.audit(
                actor=owner,
                action="experiment.create",
                target=f"experiment:{experiment.pk}",
                data={"name": name},
            )
            return experiment
    except IntegrityError:
        raise _taken(name) from None


def may_edit_experiment(experiment: Experiment, user: User) -> bool:
    """Whether the user may edit it: its owner, operators, and those of a shared team."""
    return experiment.owner_id == user.pk or teams.manages(user, experiment.owner_id)


def experiment_update(
    *,
    experiment: Experiment,
    by: User,
    name: str | None = None,
    hypothesis: str | None = None,
    notes: str | None = None,
    pinned: Sequence[str] | None = None,
) -> Experiment:
    """Set the fields that are not None, for the owner and operators.

    `pinned` lists the series charted on its page. Raises 403, 409 for a name that is taken,
    422.
    """
    if not may_edit_experiment(experiment, by):
        raise forbidden(
            f"{experiment.name!r} belongs to {experiment.owner.username}; its owner, operators "
            "and those of a shared team can edit it."
        )
    fields = {
        "name": None if name is None else checked_name(name),
        "hypothesis": hypothesis,
        "notes": notes,
        "pinned": None if pinned is None else list(pinned),
    }
    values = {column: value for column, value in fields.items() if value is not None}
    for column, value in values.items():
        setattr(experiment, column, value)
    try:
        with transaction.atomic():
            experiment.save(update_fields=list(values))
            target = f"experiment:{experiment.pk}"
            accounts.audit(
                actor=by, action="experiment.update", target=target, data={"fields": sorted(values)}
            )
    except IntegrityError:
        raise _taken(name) from None
    return experiment


def checked_name(name: str) -> str:
    """The stripped name. Raises 422 if it is not valid."""
    name = name.strip()
    if not 1 <= len(name) <= 120 or not name.isprintable():
        raise invalid(
            "name",
            "an experiment's name has 1 to 120 characters",
            "Enter the question in a few words.",
        )
    return name


def _taken(name: str | None) -> Refusal:
    return conflict(
        f"There is already an experiment {name!r}. Choose another name.", type="name-taken"
    )
