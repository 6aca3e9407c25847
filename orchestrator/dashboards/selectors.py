"""Reads dashboards; checks what a user may see and edit."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts import teams
from orchestrator.accounts.models import Team, User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.dashboards.models import Dashboard
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.panels.spec import RunsSource
from orchestrator.runs.models import Experiment, Run

_WRITERS: Final = (Role.SUBMITTER, Role.OPERATOR, Role.ADMIN)
RUNS_OF_SUBJECT: Final = 20  # newest, of an experiment or a team


def dashboards_visible_to(
    *,
    user: User,
    run: int | None = None,
    experiment: int | None = None,
    team: int | None = None,
    q: str = "",
) -> QuerySet[Dashboard]:
    """The user's own dashboards, and those of runs, experiments and teams that they see.

    Newest first. `run`, `experiment` and `team` select those of one subject.
    """
    own = Q(run=None, experiment=None, team=None)
    rows = Dashboard.objects.select_related("owner", "run", "experiment", "team")
    owners = people.visible_owners(user)
    if owners is None:
        rows = rows.filter(~own | Q(owner=user))
    else:
        rows = rows.filter(
            (own & Q(owner=user))
            | Q(run__owner__in=owners)
            | Q(experiment__owner__in=owners)
            | Q(team__in=user.memberships.values("team"))
        )
    for name, value in (("run", run), ("experiment", experiment), ("team", team)):
        if value is not None:
            rows = rows.filter(**{f"{name}_id": value})
    if q:
        rows = rows.filter(name__icontains=q)
    return rows.order_by("-id")


def dashboards_for_run(*, user: User, run: Run) -> list[Dashboard]:
    """What can show a run: dashboards of the run, of its experiment, and then the others.

    At most 50 of those that belong to no run or to this one.
    """
    rows = list(dashboards_visible_to(user=user).filter(Q(run=None) | Q(run=run))[:50])

    def distance(row: Dashboard) -> int:
        if row.run_id == run.pk:
            return 0
        if row.experiment_id is not None:
            return 1 if row.experiment_id == run.experiment_id else 4
        return 2 if row.team_id is not None else 3

    near = sorted(rows, key=distance)
    return [row for row in near if distance(row) < 4]


def dashboards_editable_by(*, user: User, run: Run | None = None) -> list[Dashboard]:
    """Those that the user may change, at most 50: with `run`, the nearest to it first."""
    if run is not None:
        rows = dashboards_for_run(user=user, run=run)
    else:
        rows = list(dashboards_visible_to(user=user)[:200])
    written = {team.pk for team in teams_written_by(user=user)}
    return [row for row in rows if teams.manages(user, row.owner_id) or row.team_id in written][:50]


def dashboard_get(*, user: User, id: int | str) -> Dashboard:
    """A dashboard that the user sees. Raises 404."""
    if is_id(id):
        row = dashboards_visible_to(user=user).filter(pk=int(id)).first()
        if row is not None:
            return row
    raise missing_object("dashboard", id)


def may_edit(dashboard: Dashboard, user: User) -> bool:
    """Whether the user may change or delete it.

    Its owner, who manages the owner's objects, and of a team's dashboard the team's submitters.
    """
    if teams.manages(user, dashboard.owner_id):
        return True
    return dashboard.team is not None and may_write_for(dashboard.team, user)


def may_write_for(team: Team, user: User) -> bool:
    """Whether the user may create and edit dashboards of a team."""
    if people.sees_everyone(user):
        return True
    is_writer = team.memberships.filter(user=user, role__in=_WRITERS).exists()
    return at_least(user.role, Role.SUBMITTER) and is_writer


def teams_written_by(*, user: User) -> list[Team]:
    """The teams for which the user may create dashboards, by name."""
    if not at_least(user.role, Role.SUBMITTER):
        return []
    rows = Team.objects.filter(memberships__user=user, memberships__role__in=_WRITERS)
    return list(rows.order_by("name"))


def spec_of(dashboard: Dashboard) -> DashboardSpec:
    """The stored document."""
    return DashboardSpec.from_dict(dashboard.document)


def source_of(dashboard: Dashboard) -> RunsSource:
    """The runs of panels that name none: the document's, else those of the subject."""
    spec = spec_of(dashboard)
    if spec.runs is not None:
        return spec.runs
    return source_of_subject(
        run=dashboard.run, experiment=dashboard.experiment, team=dashboard.team
    )


def source_of_subject(
    *, run: Run | None = None, experiment: Experiment | None = None, team: Team | None = None
) -> RunsSource:
    """The run, the newest runs of the experiment or team, or the newest that the viewer sees."""
    if run is not None:
        return RunsSource(runs=[str(run.pk)])
    if experiment is not None:
        return RunsSource(experiment=str(experiment.pk), limit=RUNS_OF_SUBJECT)
    if team is not None:
        return RunsSource(team=str(team.pk), limit=RUNS_OF_SUBJECT)
    return RunsSource(query="", limit=10)


def serialize_dashboard(row: Dashboard) -> dict[str, Any]:
    """The REST representation."""
    return {
        "id": str(row.pk),
        "name": row.name,
        "owner": row.owner.username,
        "run": str(row.run_id) if row.run_id else None,
        "experiment": str(row.experiment_id) if row.experiment_id else None,
        "team": str(row.team_id) if row.team_id else None,
        "version": row.version,
        "created": iso(row.created),
        "updated": iso(row.updated),
        "document": row.document,
    }
