"""Dashboards through REST: the document and its limits, versions, and who sees and edits them."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import Team, TeamMembership, User
from orchestrator.accounts.roles import Role
from orchestrator.dashboards import selectors, services
from orchestrator.dashboards.models import Dashboard
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories

pytestmark = pytest.mark.django_db
URL = "/api/v1/dashboards"
LINE: dict[str, Any] = {"id": "p1", "kind": "line", "metrics": ["loss"]}


@pytest.fixture
def run(owner: User) -> Run:
    return factories.external_run(owner)


def create(client: Client, *panels: dict[str, Any], **body: Any) -> Any:
    document = {"version": 1, "panels": list(panels), **body.pop("document", {})}
    body = {"name": "mine", "document": document, **body}
    return client.post(URL, body, content_type="application/json")


def change(client: Client, id: str, tag: str = "", **body: Any) -> Any:
    headers = {"If-Match": tag} if tag else {}
    return client.patch(f"{URL}/{id}", body, content_type="application/json", headers=headers)


def test_a_dashboard_is_written_and_read(owner: User, run: Run) -> None:
    client = factories.api(owner)
    panels: list[dict[str, Any]] = [
        {**LINE, "y_log": True, "y_min": 0.5, "pinned": True, "smoothing": 0.9},
        {"id": "p2", "kind": "bar", "pattern": "^val_", "runs": {"experiment": 3, "limit": 5}},
        {"id": "p3", "kind": "markdown", "text": "# Why"},
    ]
    made = create(client, *panels, run=run.pk, document={"runs": {"query": "loss < 2"}})
    assert made.status_code == 201, made.content
    stored = client.get(made["Location"]).json()
    assert (stored["run"], stored["experiment"], stored["team"]) == (str(run.pk), None, None)
    expected = [panels[0], {**panels[1], "runs": {"experiment": "3", "limit": 5}}, panels[2]]
    document = {"version": 1, "panels": expected, "runs": {"query": "loss < 2"}}
    assert stored["document"] == document  # what is a default is not stored
    again = change(client, stored["id"], document=stored["document"])
    assert again.json()["document"] == document
    assert [row["id"] for row in client.get(f"{URL}?run={run.pk}").json()["items"]] == [
        stored["id"]
    ]
    assert client.get(f"{URL}?team=1").json()["items"] == []
    assert client.delete(f"{URL}/{stored['id']}").status_code == 204
    assert client.get(f"{URL}/{stored['id']}").status_code == 404


def test_an_edit_of_an_older_version_is_refused(owner: User) -> None:
    client = factories.api(owner)
    id = create(client, LINE).json()["id"]
    tag = client.get(f"{URL}/{id}")["ETag"]
    first = change(client, id, tag, name="first")
    assert (first.status_code, first.json()["version"]) == (200, 2)
    second = change(client, id, tag, name="second")
    assert second.status_code == 412
    assert second.json()["type"].endswith("/edited-meanwhile")
    assert client.get(f"{URL}/{id}").json()["name"] == "first"


@pytest.mark.parametrize(
    ("panels", "document", "field", "message"),
    [
        ([{**LINE, "kind": "pie"}], {}, "document.panels.0.kind", "'pie' is not one of"),
        (
            [LINE, {"id": "p2", "kind": "line", "pattern": "loss["}],
            {},
            "document.panels.1.pattern",
            "at character 5 of 'loss[': this bracket is not closed",
        ),
        (
            [{**LINE, "id": f"p{number}"} for number in range(101)],
            {},
            "document.panels",
            "a dashboard has at most 100 panels, not 101",
        ),
        (
            [{"id": f"p{number}", "kind": "line", "pattern": "a"} for number in range(21)],
            {},
            "document.panels",
            "21 panels have a pattern, more than 20",
        ),
        ([LINE, LINE], {}, "document.panels", "2 panels have the id 'p1'"),
        ([LINE], {"version": 2}, "document.version", "2 is out of range"),
        ([LINE], {"layout": "grid"}, "document.layout", "layout is not a field"),
    ],
)
def test_documents_that_are_refused(
    panels: list[dict[str, Any]], document: dict[str, Any], field: str, message: str, owner: User
) -> None:
    answer = create(factories.api(owner), *panels, document=document)
    assert answer.status_code == 422
    errors = answer.json()["errors"]
    assert [error["field"] for error in errors] == [field]
    assert message in errors[0]["message"]


def test_who_sees_and_edits(people: factories.People, run: Run) -> None:
    owner, teammate, stranger = people.owner, people.teammate, people.stranger
    experiment = runs.experiment_create(owner=owner, name="question")
    team = Team.objects.get(name="lab")
    client = factories.api(owner)
    own = create(client, LINE).json()["id"]
    of_run = create(client, LINE, run=run.pk).json()["id"]
    of_experiment = create(client, LINE, experiment=experiment.pk).json()["id"]
    of_team = create(client, LINE, team=team.pk).json()["id"]

    def seen(user: User) -> set[str]:
        items = factories.api(user).get(URL).json()["items"]
        return {item["id"] for item in items}

    assert seen(owner) == {own, of_run, of_experiment, of_team}
    assert seen(teammate) == seen(people.operator) == {of_run, of_experiment, of_team}
    assert seen(stranger) == set()
    changes = {id: change(factories.api(teammate), id, name="x").status_code for id in seen(owner)}
    assert changes == {own: 404, of_run: 403, of_experiment: 403, of_team: 200}
    TeamMembership.objects.filter(user=teammate).update(role=Role.VIEWER)
    assert change(factories.api(teammate), of_team, name="y").status_code == 403
    assert create(factories.api(teammate), LINE, team=team.pk).status_code == 403
    TeamMembership.objects.filter(user=teammate).update(role=Role.OPERATOR)
    assert change(factories.api(teammate), of_run, name="z").status_code == 200


def test_dashboards_to_edit_are_listed_with_a_fixed_number_of_queries(
    people: factories.People,
) -> None:
    team = Team.objects.get(members=people.owner)

    def listed() -> tuple[list[Dashboard], int]:
        user = User.objects.get(pk=people.teammate.pk)
        with CaptureQueriesContext(connection) as queries:
            rows = selectors.dashboards_editable_by(user=user)
        return rows, len(queries)

    def add(name: str) -> Dashboard:
        return services.dashboard_create(
            owner=people.owner, name=name, spec=DashboardSpec(), team=team
        )

    first = add("first")
    rows, queries = listed()
    assert rows == [first]
    added = [add(f"more {n}") for n in range(5)]
    assert listed() == ([*reversed(added), first], queries)
    TeamMembership.objects.filter(user=people.teammate).update(role=Role.VIEWER)
    assert listed()[0] == []


def test_subjects_that_the_caller_does_not_see(owner: User, run: Run) -> None:
    outsider = factories.api(factories.user("outsider"))
    for subject in ({"run": run.pk}, {"team": Team.objects.get(name="lab").pk}, {"run": 999}):
        assert create(outsider, LINE, **subject).status_code == 404
    both = create(factories.api(owner), LINE, run=run.pk, team=Team.objects.get(name="lab").pk)
    assert both.json()["errors"][0]["message"] == "a dashboard has one of run, experiment and team"
