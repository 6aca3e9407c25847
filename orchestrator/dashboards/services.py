"""Creates, changes and deletes dashboards."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from django.db import transaction
from pydantic import ValidationError

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, conflict, forbidden, invalid, invalid_document
from orchestrator.dashboards import selectors
from orchestrator.dashboards.models import Dashboard
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.panels.spec import PanelSpec
from orchestrator.runs.models import Experiment, Run
from workers.contracts.base import validation_problems

MOST: Final = 200  # dashboards of a person
# metrics that a suggested dashboard shows if the runs log them, and whether logarithmic
_SUGGESTED: Final = (
    ("loss", True),
    ("val_loss", True),
    ("reward/mean", False),
    ("grad_norm", True),
    ("lr", False),
    ("tokens_per_s", False),
    ("inference/tokens_per_s", False),
    ("mfu", False),
)
_FEW: Final = 6  # other metrics of a suggested dashboard


def dashboard_create(
    *,
    owner: User,
    name: str,
    spec: DashboardSpec,
    run: Run | None = None,
    experiment: Experiment | None = None,
    team: Team | None = None,
) -> Dashboard:
    """Create a dashboard of a subject that the owner sees, or of the owner alone.

    Raises 403 for viewers and for teams in which the owner may not write, 409, 422.
    """
    accounts.require_role(owner, Role.SUBMITTER, "create dashboards")
    name = _name(name)
    if sum(subject is not None for subject in (run, experiment, team)) > 1:
        raise invalid("run", "a dashboard has one of run, experiment and team", "Use one of them.")
    if team is not None and not selectors.may_write_for(team, owner):
        raise forbidden(
            f"Only submitters of the team {team.name} create its dashboards; {owner.username} is "
            "not one."
        )
    if Dashboard.objects.filter(owner=owner).count() >= MOST:
        raise conflict(f"A person has at most {MOST} dashboards. Delete one first.")
    with transaction.atomic():
        now = clock.now()
        row = Dashboard.objects.create(
            owner=owner,
            name=name,
            run=run,
            experiment=experiment,
            team=team,
            document=spec.to_document(),
            created=now,
            updated=now,
        )
        _audit(owner, "create", row)
    return row


def dashboard_update(
    *,
    dashboard: Dashboard,
    by: User,
    name: str | None = None,
    spec: DashboardSpec | None = None,
    version: int | None = None,
) -> Dashboard:
    """Rename it, or replace its document. Raises 403, 422, and 412 for another `version`."""
    _require_editor(dashboard, by)
    expected = dashboard.version if version is None else version
    changes = {"name": _name(name)} if name is not None else {}
    document = dashboard.document if spec is None else spec.to_document()
    with transaction.atomic():
        # of two edits of the same version, the second one changes no row
        changed = Dashboard.objects.filter(pk=dashboard.pk, version=expected).update(
            **changes, document=document, version=expected + 1, updated=clock.now()
        )
        if not changed:
            dashboard.refresh_from_db(fields=["version"])
            raise Refusal(
                "edited-meanwhile",
                "It was edited meanwhile",
                412,
                f"The dashboard is at version {dashboard.version}, your change is of version "
                f"{expected}. Read it again, then repeat your change.",
            )
        dashboard.refresh_from_db()
        _audit(by, "update", dashboard)
    return dashboard


def panel_add(*, dashboard: Dashboard, by: User, panel: PanelSpec) -> Dashboard:
    """Append a panel, or put a pinned one after the pinned ones.

    Its id gets a number if another panel has it. Raises 403, 422, and 412 if it was edited
    meanwhile.
    """
    spec = selectors.spec_of(dashboard)
    added = panel.model_copy(update={"id": _free_id(panel.id, {each.id for each in spec.panels})})
    panels = sorted([*spec.panels, added], key=lambda each: not each.pinned)
    document = {**spec.to_document(), "panels": [each.to_document() for each in panels]}
    try:
        changed = DashboardSpec.from_dict(document)
    except ValidationError as error:
        raise invalid_document(validation_problems(error)) from None
    return dashboard_update(dashboard=dashboard, by=by, spec=changed)


def dashboard_delete(*, dashboard: Dashboard, by: User) -> None:
    """Delete it. Raises 403."""
    _require_editor(dashboard, by)
    with transaction.atomic():
        _audit(by, "delete", dashboard)
        dashboard.delete()


def suggested(names: Collection[str], *, several: bool) -> DashboardSpec:
    """A first dashboard for runs with these metrics; `several`: with a table of the runs."""
    known = [(name, log) for name, log in _SUGGESTED if name in names]
    others = [name for name in sorted(names) if "/" not in name and name not in dict(known)]
    chosen = known or [(name, False) for name in others[:_FEW]]
    panels = [
        PanelSpec(
            id=f"p{place}",
            kind="line",
            metrics=[name],
            y_log=log,
            size="large" if place == 1 else "small",
        )
        for place, (name, log) in enumerate(chosen, 1)
    ]
    if several:
        columns = ["state", "model", "created"]
        metrics = [name for name, _ in chosen[:4]]
        table = PanelSpec(
            id="runs", kind="table", title="Runs", columns=columns, metrics=metrics, size="large"
        )
        panels.append(table)
    return DashboardSpec(panels=panels)


def _free_id(wanted: str, used: Collection[str]) -> str:
    if wanted not in used:
        return wanted
    numbers = range(2, len(used) + 3)
    return next(id for n in numbers if (id := f"{wanted[:34]}-{n}") not in used)


def _require_editor(dashboard: Dashboard, by: User) -> None:
    if not selectors.may_edit(dashboard, by):
        raise forbidden(
            f"{dashboard.name!r} belongs to {dashboard.owner.username}, who can change it. Copy "
            "it, and change the copy."
        )


def _name(text: str) -> str:
    name = " ".join(text.split())
    if not 1 <= len(name) <= 120 or not name.isprintable():
        raise invalid(
            "name",
            "a dashboard's name has 1 to 120 characters",
            "Name the dashboard after what it shows.",
        )
    return name


def _audit(by: User, action: str, row: Dashboard) -> None:
    data = {"name": row.name}
    accounts.audit(actor=by, action=f"dashboard.{action}", target=f"dashboard:{row.pk}", data=data)
