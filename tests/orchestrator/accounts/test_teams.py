"""Teams: roles of members, who manages whose runs, budgets with messages, pages and REST."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts import teams
from orchestrator.accounts.models import AuditEntry, Team, TeamMembership, User
from orchestrator.accounts.roles import Role
from orchestrator.background_jobs.models import Delivery, Subscription, UsageDay
from orchestrator.background_jobs.notifications import collect
from orchestrator.background_jobs.usage import budgets
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.runs import services as runs
from tests import factories

pytestmark = pytest.mark.django_db
JSON = "application/json"


@pytest.fixture
def lab(people: factories.People) -> Team:
    return Team.objects.get(name="lab")


def role_of(team: Team, user: User, role: Role) -> User:
    """The user, read again as in a new request, with this role in the team."""
    TeamMembership.objects.filter(team=team, user=user).update(role=role)
    return User.objects.get(pk=user.pk)


def test_operators_of_a_team_manage_the_runs_of_its_members(
    lab: Team, owner: User, teammate: User, stranger: User, live_redis: str
) -> None:
    run = factories.external_run(owner)
    for role, may in (
        (Role.VIEWER, False),
        (Role.SUBMITTER, False),
        (Role.OPERATOR, True),
        (Role.ADMIN, True),
    ):
        assert runs.may_manage(run, role_of(lab, teammate, role)) is may, role
    # the role of the account is the upper limit
    lab.members.add(stranger)
    assert not runs.may_manage(run, role_of(lab, stranger, Role.OPERATOR))
    # a team that the owner has left gives no rights
    lab.members.remove(owner)
    assert not runs.may_manage(run, User.objects.get(pk=teammate.pk))


def test_experiments_follow_the_same_rule(lab: Team, owner: User, teammate: User) -> None:
    item = runs.experiment_create(owner=owner, name="question")
    with pytest.raises(Refusal, match="those of a shared team"):
        runs.experiment_update(experiment=item, by=teammate, notes="x")
    runs.experiment_update(experiment=item, by=role_of(lab, teammate, Role.OPERATOR), notes="y")
    item.refresh_from_db()
    assert item.notes == "y"


def test_members_are_changed_by_admins_of_the_team(
    lab: Team, owner: User, teammate: User, operator: User, admin: User
) -> None:
    new = factories.user("new")
    for by in (owner, operator):
        with pytest.raises(Refusal, match="Only admins of the team lab"):
            teams.member_set(team=lab, username="new", role="viewer", by=by)
    owner = role_of(lab, owner, Role.ADMIN)
    teams.member_set(team=lab, username="new", role="viewer", by=owner)
    teams.member_set(team=lab, username="new", role="operator", by=owner)
    assert TeamMembership.objects.get(team=lab, user=new).role == "operator"
    with pytest.raises(Refusal, match="set budgets"):
        teams.team_update(team=lab, by=owner, budget_device_hours=5)
    with pytest.raises(Refusal) as refused:
        teams.member_set(team=lab, username="missing", role="viewer", by=admin)
    assert refused.value.errors[0]["message"] == "there is no user 'missing'"
    teams.member_remove(team=lab, username=teammate.username, by=teammate)  # leaves
    with pytest.raises(Refusal):
        teams.member_remove(team=lab, username=teammate.username, by=admin)
    actions = AuditEntry.objects.filter(action__startswith="team.").values_list("action", flat=True)
    assert list(actions) == ["team.member", "team.member", "team.member_removed"]


def test_names_are_unique_and_deleting_keeps_runs(
    lab: Team, owner: User, admin: User, live_redis: str
) -> None:
    run = factories.external_run(owner)
    second = teams.team_create(name="  two  words ", by=admin)
    assert second.name == "two words"
    for name, status in (("lab", 409), ("", 422), ("x" * 81, 422)):
        with pytest.raises(Refusal) as refused:
            teams.team_create(name=name, by=admin)
        assert refused.value.status == status
    with pytest.raises(Refusal):
        teams.team_update(team=second, by=admin, name="lab")
    teams.team_delete(team=lab, by=admin)
    run.refresh_from_db()
    assert run.owner == owner


def used(owner: User, hours: float, team: str = "") -> None:
    UsageDay.objects.create(
        day=clock.now().date(),
        owner=owner.pk,
        person=owner.username,
        teams=[team] if team else [],
        pool="default",
        device_s=3600 * hours,
        productive_s=1800 * hours,
    )


def test_a_budget_warns_once_at_each_level(
    clock: Any, lab: Team, owner: User, stranger: User, operator: User, admin: User
) -> None:
    for user, scope in ((owner, "own"), (operator, "team")):
        Subscription.objects.create(
            owner=user, name="b", channel="webhook", target="x", events=["budget"], scope=scope
        )
    teams.team_update(team=lab, by=admin, budget_device_hours=10)
    used(owner, 7.9)
    collect.collect()
    assert not Delivery.objects.exists()
    UsageDay.objects.update(device_s=3600 * 8.5)
    for _ in range(2):
        collect.collect()
    assert Delivery.objects.count() == 2
    sent = Delivery.objects.first()
    assert sent is not None and sent.event == "budget"
    assert sent.body["text"] == "Team lab used 8.5 of 10.0 device-hours (85%) in January 2026."
    UsageDay.objects.update(device_s=3600 * 10)
    collect.collect()
    assert sorted(Delivery.objects.values_list("key", flat=True)) == sorted(
        [f"budget:{lab.pk}:2026-01:{level}" for level in (80, 100)] * 2
    )
    clock.advance(40 * 86400)  # another month, without use
    assert budgets.use_of(lab).device_hours == 0
    collect.collect()
    assert Delivery.objects.count() == 4


def test_former_members_count_for_the_days_of_their_membership(lab: Team, stranger: User) -> None:
    used(stranger, 2, team="lab")
    assert budgets.use_of(lab).device_hours == 2


def test_rest(lab: Team, owner: User, stranger: User, admin: User) -> None:
    boss, member, outside = factories.api(admin), factories.api(owner), factories.api(stranger)
    made = boss.post("/api/v1/teams", {"name": "new"}, content_type=JSON)
    assert made.status_code == 201
    address = f"/api/v1/teams/{made.json()['id']}"
    assert member.get(address).status_code == 404
    added = boss.put(f"{address}/members/owner", {"role": "admin"}, content_type=JSON)
    assert added.json() == {"username": "owner", "role": "admin"}
    added = member.put(f"{address}/members/stranger", {}, content_type=JSON)
    assert added.json()["role"] == "submitter"
    changed = boss.patch(address, {"budget_device_hours": 100.5}, content_type=JSON).json()
    assert changed["budget_device_hours"] == 100.5 and changed["used_device_hours"] == 0
    assert outside.get(address).json()["members"] == [
        {"username": "owner", "role": "admin"},
        {"username": "stranger", "role": "submitter"},
    ]
    assert boss.delete(f"{address}/members/stranger").status_code == 204
    removed = boss.patch(address, {"budget_device_hours": 0}, content_type=JSON).json()
    assert removed["budget_device_hours"] is None
    assert [each["name"] for each in member.get("/api/v1/teams").json()["items"]] == ["lab", "new"]
    wrong = boss.put(f"{address}/members/owner", {"role": "king"}, content_type=JSON)
    assert wrong.status_code == 422 and "operator" in wrong.json()["errors"][0]["hint"]
    assert boss.delete(address).status_code == 204


def test_pages(lab: Team, owner: User, teammate: User, admin: User, live_redis: str) -> None:
    used(owner, 3)
    lab.budget_device_hours = 3
    lab.save()
    browser, boss = factories.client_for(owner), factories.client_for(admin)
    listed = browser.get("/account/teams/").content.decode()
    assert "lab" in listed and "100" in listed and "New team" not in listed
    page = browser.get(f"/account/teams/{lab.pk}/").content.decode()
    assert "teammate" in page and "The budget is used up" in page and "Add a member" not in page
    made = boss.post("/account/teams/", {"name": "new"})
    address = made["Location"]
    for path, data in (
        (f"{address}members/", {"username": "owner", "role": "viewer"}),
        (f"{address}change/", {"budget": "1,000"}),
        (f"{address}change/", {"name": "newer"}),
    ):
        assert boss.post(path, data)["Location"] == address
    team = Team.objects.get(name="newer")
    assert team.budget_device_hours == 1000
    assert team.memberships.get().role == "viewer"
    wrong = boss.post(f"{address}members/", {"username": "missing", "role": "viewer"})
    assert wrong.status_code == 422 and "there is no user" in wrong.content.decode()
    wrong = boss.post(f"{address}change/", {"budget": "much"})
    assert wrong.status_code == 422
    boss.post(f"{address}change/", {"budget": ""})
    left = browser.post(f"{address}members/owner/remove/")
    assert left["Location"] == "/account/teams/"
    assert boss.post(f"{address}delete/")["Location"] == "/account/teams/"
    empty = factories.client_for(factories.user("alone")).get("/account/teams/").content.decode()
    assert "No teams yet" in empty


def test_many_teams_need_few_queries(
    admin: User, owner: User, django_assert_max_num_queries: Any
) -> None:
    for number in range(20):
        Team.objects.create(name=f"t{number}").members.add(owner)
    used(owner, 1)
    client = factories.client_for(admin)
    client.get("/account/teams/")
    with django_assert_max_num_queries(12):
        client.get("/account/teams/")
    rest = factories.api(admin)
    rest.get("/api/v1/teams")
    with django_assert_max_num_queries(12):
        rows = rest.get("/api/v1/teams").json()["items"]
    assert {row["used_device_hours"] for row in rows if row["name"].startswith("t")} == {1.0}
