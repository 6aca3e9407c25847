"""Creates, changes and reads teams and their members; says who manages whose objects."""

from __future__ import annotations

import math
from collections.abc import Iterable

from django.db import IntegrityError, transaction
from django.db.models import Count, QuerySet

from orchestrator.accounts.models import Team, TeamMembership, User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.accounts.selectors import sees_everyone
from orchestrator.accounts.services import audit, require_role
from orchestrator.common.errors import conflict, forbidden, invalid, missing_object
from orchestrator.common.redis import wake_scheduler
from orchestrator.common.units import is_id

MOST_HOURS = 1e12
MOST_DEVICES = 1_000_000
MOST_SHARE = 1000
_MANAGED = "_orrery_managed_owners"  # attribute of a user object, which exists for one request


def teams_visible_to(*, user: User) -> QuerySet[Team]:
    """The user's teams, for operators all, by name, with the number of `people`."""
    teams = Team.objects.annotate(people=Count("memberships")).order_by("name")
    return teams if sees_everyone(user) else teams.filter(memberships__in=user.memberships.all())


def team_get(*, user: User, id: int | str) -> Team:
    """A team that the user sees. Raises 404."""
    if is_id(id):
        team = teams_visible_to(user=user).filter(pk=int(id)).first()
        if team is not None:
            return team
    raise missing_object("team", id)


def members_of(*, team: Team) -> QuerySet[TeamMembership]:
    """The members with their roles, by name."""
    return team.memberships.select_related("user").order_by("user__username")


def members_by_team(rows: Iterable[Team]) -> dict[int, list[TeamMembership]]:
    """`{team's id: its members, by name}`, in one query."""
    members: dict[int, list[TeamMembership]] = {team.pk: [] for team in rows}
    of_teams = TeamMembership.objects.filter(team__in=members).select_related("user")
    for member in of_teams.order_by("user__username"):
        members[member.team_id].append(member)
    return members


def may_administer(user: User, team: Team) -> bool:
    """Whether the user may change the team's members: its admins, and admins of the site."""
    if at_least(user.role, Role.ADMIN) or user.is_superuser:
        return True
    return team.memberships.filter(user=user, role=Role.ADMIN).exists()


def manages(user: User, owner_id: int | None) -> bool:
    """Whether the user may manage the objects of an owner.

    Submitters their own; operators and admins of a team those of its members; operators of the
    site all.
    """
    if sees_everyone(user):
        return True
    if not at_least(user.role, Role.SUBMITTER) or owner_id is None:
        return False
    return owner_id == user.pk or owner_id in _managed_owners(user)


def _managed_owners(user: User) -> frozenset[int]:
    """Ids of the members of all teams that the user operates; read once per user object."""
    known = user.__dict__.get(_MANAGED)
    if known is None:
        operated = user.memberships.filter(role__in=[Role.OPERATOR, Role.ADMIN]).values("team")
        known = frozenset(
            TeamMembership.objects.filter(team__in=operated).values_list("user", flat=True)
        )
        user.__dict__[_MANAGED] = known
    return known


def team_create(*, name: str, by: User) -> Team:
    """Create a team without members. Raises 403, 409 for a name in use, 422."""
    require_role(by, Role.ADMIN, "create teams")
    name = _name(name)
    try:
        with transaction.atomic():
            team = Team.objects.create(name=name)
            audit(actor=by, action="team.create", target=_target(team), data={"name": name})
    except IntegrityError:
        raise conflict(f"There is already a team {name}. Choose another name.") from None
    return team


def team_update(
    *,
    team: Team,
    by: User,
    name: str | None = None,
    budget_device_hours: float | None = None,
    without_budget: bool = False,
    max_devices: int | None = None,
    without_quota: bool = False,
    share: float | None = None,
) -> Team:
    """Rename a team, or set its monthly budget, its quota of devices or its fair share.

    Only admins of the site set the latter three. A quota below what the team holds stops no run.
    Raises 403, 409 for a name that is taken, 422.
    """
    _require_admin(team, by)
    changes: dict[str, object] = {}
    if name is not None and _name(name) != team.name:
        changes["name"] = _name(name)
    if budget_device_hours is not None or without_budget:
        require_role(by, Role.ADMIN, "set budgets")
        hours = None if without_budget else budget_device_hours
        if hours is not None and not (math.isfinite(hours) and 0 < hours <= MOST_HOURS):
            message = f"{hours:g} is not a number of device-hours"
            raise invalid("budget_device_hours", message, "Use a number above 0.")
        changes["budget_device_hours"] = hours
    changes |= _limits(by, max_devices, without_quota, share)
    if not changes:
        return team
    try:
        with transaction.atomic():
            for field, value in changes.items():
                setattr(team, field, value)
            team.save(update_fields=list(changes))
            audit(actor=by, action="team.update", target=_target(team), data=changes)
            wake_scheduler()
    except IntegrityError:
        raise conflict(f"There is already a team {name}. Choose another name.") from None
    return team


def _limits(
    by: User, max_devices: int | None, without_quota: bool, share: float | None
) -> dict[str, object]:
    changes: dict[str, object] = {}
    if max_devices is not None or without_quota:
        require_role(by, Role.ADMIN, "set quotas of teams")
        if max_devices is not None and not 0 <= max_devices <= MOST_DEVICES:
            message = f"{max_devices} is not a number of devices"
            raise invalid(
                "max_devices", message, f"Use 0 to {MOST_DEVICES:,}, or null for no quota."
            )
        changes["max_devices"] = None if without_quota else max_devices
    if share is not None:
        require_role(by, Role.ADMIN, "set shares of teams")
        if not (math.isfinite(share) and 0 < share <= MOST_SHARE):
            message = f"{share:g} is not a share"
            raise invalid("share", message, f"Use a number above 0, at most {MOST_SHARE:,}.")
        changes["share"] = share
    return changes


def team_delete(*, team: Team, by: User) -> None:
    """Delete a team; its members keep their runs and no longer see each other's."""
    require_role(by, Role.ADMIN, "delete teams")
    with transaction.atomic():
        audit(actor=by, action="team.delete", target=_target(team), data={"name": team.name})
        team.delete()


def member_set(*, team: Team, username: str, role: str, by: User) -> TeamMembership:
    """Add a user to a team or change the role there. Raises 403, 422 for unknown names."""
    _require_admin(team, by)
    if role not in Role.values:
        raise invalid("role", f"{role!r} is not a role", f"Use one of {', '.join(Role.values)}.")
    user = User.objects.filter(username=username.strip()).first()
    if user is None:
        raise invalid("username", f"there is no user {username[:80]!r}", "Use the name of a user.")
    with transaction.atomic():
        member, new = TeamMembership.objects.update_or_create(
            team=team, user=user, defaults={"role": role}
        )
        data = {"team": team.name, "username": user.username, "role": role, "new": new}
        audit(actor=by, action="team.member", target=_target(team), data=data)
    return member


def member_remove(*, team: Team, username: str, by: User) -> None:
    """Take a user out of a team; users may leave by themselves. Raises 403 and 404."""
    if username != by.username:
        _require_admin(team, by)
    with transaction.atomic():
        removed, _ = team.memberships.filter(user__username=username).delete()
        if not removed:
            raise missing_object("member", username)
        data = {"team": team.name, "username": username}
        audit(actor=by, action="team.member_removed", target=_target(team), data=data)


def memberships_replace(
    *, user: User, roles: dict[str, str], managed: Iterable[str] | None = None, create: bool = False
) -> None:
    """Set a user's teams from an identity provider: `roles` maps team names to roles.

    Teams outside `managed` (None: all) keep the user. Unknown teams are created with `create`, else
    left out.
    """
    with transaction.atomic():
        names = set(roles)
        teams = {team.name: team for team in Team.objects.filter(name__in=names)}
        if create:
            for name in sorted(names - teams.keys()):
                teams[name] = Team.objects.create(name=_name(name))
        before = dict(user.memberships.values_list("team__name", "role"))
        after = {name: role for name, role in roles.items() if name in teams}
        allowed = None if managed is None else set(managed)
        gone = [
            name for name in before if name not in after and (allowed is None or name in allowed)
        ]
        changed = {name: role for name, role in after.items() if before.get(name) != role}
        if not gone and not changed:
            return
        user.memberships.filter(team__name__in=gone).delete()
        for name, role in changed.items():
            TeamMembership.objects.update_or_create(
                team=teams[name], user=user, defaults={"role": role}
            )
        data = {"set": changed, "removed": sorted(gone)}
        audit(actor=user, action="team.login", target=f"user:{user.pk}", data=data)


def _require_admin(team: Team, by: User) -> None:
    if not may_administer(by, team):
        raise forbidden(
            f"Only admins of the team {team.name} change it; {by.username} is not one. Ask an "
            "admin."
        )


def _name(text: str) -> str:
    name = " ".join(text.split())
    if not 1 <= len(name) <= 80:
        raise invalid("name", "the name of a team has 1 to 80 characters")
    return name


def _target(team: Team) -> str:
    return f"team:{team.pk}"
