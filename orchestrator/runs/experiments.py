"""Writes experiments: questions, and the runs that answer them."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid
from orchestrator.runs.models import Experiment


def experiment_create(
    *, owner: User, name: str, hypothesis: str = "", notes: str = "", pinned: Sequence[str] = ()
) -> Experiment:
    """A question for runs to answer. Names are unique: 409 for one that is taken."""
    accounts.require_role(owner, Role.SUBMITTER, "make experiments")
    name = checked_name(name)
    try:
        with transaction.atomic():
            made = Experiment.objects.create(
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
                target=f"experiment:{made.pk}",
                data={"name": name},
            )
            return made
    except IntegrityError:
        raise _taken(name) from None


def experiment_update(
    *,
    experiment: Experiment,
    by: User,
    name: str | None = None,
    hypothesis: str | None = None,
    notes: str | None = None,
    pinned: Sequence[str] | None = None,
) -> Experiment:
    """Edits what is given, `pinned` being the series charted on its page; owner and operators only."""
    if experiment.owner_id != by.pk and not at_least(by.role, Role.OPERATOR):
        raise forbidden(
            f"{experiment.name!r} belongs to {experiment.owner.username}; its owner and operators "
            "edit it."
        )
    given = {
        "name": None if name is None else checked_name(name),
        "hypothesis": hypothesis,
        "notes": notes,
        "pinned": None if pinned is None else list(pinned),
    }
    values = {column: value for column, value in given.items() if value is not None}
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
    """The name without blanks around it. Raises 422."""
    name = name.strip()
    if not 1 <= len(name) <= 120 or not name.isprintable():
        raise invalid(
            "name", "an experiment's name has 1 to 120 characters", "its question in a few words"
        )
    return name


def _taken(name: str | None) -> Refusal:
    return conflict(
        f"There is an experiment {name!r} already. Choose another name.", type="name-taken"
    )
