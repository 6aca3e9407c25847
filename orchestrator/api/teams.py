"""Teams: list, create, change and delete; their members with roles; use of the month's budget."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema
from pydantic import Field

from orchestrator.accounts import teams
from orchestrator.accounts.roles import Role
from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.background_jobs.usage import budgets
from orchestrator.scheduling.reserved import guarantees
from workers.contracts.base import Contract

router = Router(tags=["accounts"])


class MemberOut(Schema):
    """A member of a team."""

    username: str
    role: str = Field(description="viewer, submitter, operator or admin, for the team's runs")


class PoolUseOut(Schema):
    """What the team holds of a pool."""

    pool: str
    held_devices: int
    guaranteed_devices: int = Field(description="what the team gets first when it needs it")
    borrowed_devices: int = Field(description="beyond the guarantee; others may take them back")


class TeamOut(Schema):
    """A team with its members."""

    id: str
    name: str
    members: list[MemberOut]
    budget_device_hours: float | None = Field(description="per calendar month (UTC)")
    used_device_hours: float = Field(description="in this month, measured every hour")
    max_devices: int | None = Field(description="quota in all pools; null: none")
    share: float = Field(description="weight of the team's fair share")
    held_devices: int
    pools: list[PoolUseOut]
    notes: list[str] = Field(description="limits that the team exceeds, and what follows")


class NewTeam(Contract):
    """A team to create."""

    name: Annotated[str, Field(min_length=1, max_length=80)]


class TeamChange(Contract):
    """What changes; `budget_device_hours` 0 and `max_devices` null remove the limit."""

    name: Annotated[str | None, Field(min_length=1, max_length=80)] = None
    budget_device_hours: Annotated[float | None, Field(ge=0)] = None
    max_devices: Annotated[int | None, Field(ge=0, le=teams.MOST_DEVICES)] = None
    share: Annotated[float | None, Field(gt=0, le=teams.MOST_SHARE)] = None


class Guarantee(Contract):
    """Devices of the pool that the team gets first; 0 ends the guarantee."""

    devices: Annotated[int, Field(ge=0, le=teams.MOST_DEVICES)]


class MemberRole(Contract):
    """The role of a member in the team."""

    role: str = Role.SUBMITTER.value


def _team(team: Any) -> dict[str, Any]:
    return _teams([team])[0]


def _teams(rows: list[Any]) -> list[dict[str, Any]]:
    uses, held = budgets.uses(rows), guarantees.team_uses(rows)
    members = teams.members_by_team(rows)
    return [_team_of(team, uses[team.pk], held[team.pk], members[team.pk]) for team in rows]


def _team_of(
    team: Any, use: budgets.TeamUse, held: guarantees.TeamUse, members: list[Any]
) -> dict[str, Any]:
    return {
        "id": str(team.pk),
        "name": team.name,
        "members": [_member(each) for each in members],
        "budget_device_hours": team.budget_device_hours,
        "used_device_hours": round(use.device_hours, 3),
        "max_devices": team.max_devices,
        "share": team.share,
        "held_devices": held.held,
        "pools": [
            {
                "pool": pool.pool,
                "held_devices": pool.held,
                "guaranteed_devices": pool.guaranteed,
                "borrowed_devices": pool.borrowed,
            }
            for pool in held.pools
        ],
        "notes": held.notes,
    }


def _member(member: Any) -> dict[str, Any]:
    return {"username": member.user.username, "role": member.role}


@router.get("", response=list[TeamOut], auth=require_scope("read"), summary="List teams")
@paginated(name="teams", serialize_page=_teams)
def team_list(request: HttpRequest) -> Any:
    """Your teams; for operators all."""
    return teams.teams_visible_to(user=user(request)).order_by("pk")


@router.post("", response={201: TeamOut}, auth=require_scope("admin"), summary="Create a team")
@creates(TeamOut)
def team_create(request: HttpRequest, body: NewTeam) -> dict[str, Any]:
    """Creates a team without members. For admins."""
    return _team(teams.team_create(name=body.name, by=user(request)))


@router.get("/{int:id}", response=TeamOut, auth=require_scope("read"), summary="Get a team")
def team_detail(request: HttpRequest, id: int) -> dict[str, Any]:
    """The team with its members and the device-hours that they used in this month."""
    return _team(teams.team_get(user=user(request), id=id))


@router.patch("/{int:id}", response=TeamOut, auth=require_scope("runs"), summary="Change a team")
def team_update(request: HttpRequest, id: int, body: TeamChange) -> dict[str, Any]:
    """Renames the team (its admins), or sets budget, quota or share (admins).

    A quota below what the team holds stops no run: `notes` say so.
    """
    by = user(request)
    team = teams.team_get(user=by, id=id)
    hours = body.budget_device_hours
    changed = teams.team_update(
        team=team,
        by=by,
        name=body.name,
        budget_device_hours=hours or None,
        without_budget=hours == 0,
        max_devices=body.max_devices,
        without_quota="max_devices" in body.model_fields_set and body.max_devices is None,
        share=body.share,
    )
    return _team(changed)


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("admin"), summary="Delete a team"
)
def team_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the team; its members keep their runs. For admins."""
    by = user(request)
    teams.team_delete(team=teams.team_get(user=by, id=id), by=by)
    return HttpResponse(status=204)


@router.put(
    "/{int:id}/guarantees/{pool}",
    response=TeamOut,
    auth=require_scope("admin"),
    summary="Guarantee devices of a pool",
)
def guarantee_set(request: HttpRequest, id: int, pool: str, body: Guarantee) -> dict[str, Any]:
    """The team's runs get these devices first, by preemption if others use them. For admins."""
    by = user(request)
    team = teams.team_get(user=by, id=id)
    guarantees.guarantee_set(team=team, pool=guarantees.pool_get(pool), devices=body.devices, by=by)
    return _team(team)


@router.put(
    "/{int:id}/members/{username}",
    response=MemberOut,
    auth=require_scope("runs"),
    summary="Add a member or change the role",
)
def member_set(request: HttpRequest, id: int, username: str, body: MemberRole) -> dict[str, Any]:
    """For admins of the team. The role holds for the runs of the team's members."""
    by = user(request)
    team = teams.team_get(user=by, id=id)
    return _member(teams.member_set(team=team, username=username, role=body.role, by=by))


@router.delete(
    "/{int:id}/members/{username}",
    response={204: None},
    auth=require_scope("runs"),
    summary="Remove a member",
)
def member_remove(request: HttpRequest, id: int, username: str) -> HttpResponse:
    """For admins of the team; users may remove themselves."""
    by = user(request)
    teams.member_remove(team=teams.team_get(user=by, id=id), username=username, by=by)
    return HttpResponse(status=204)
