"""Dashboard pages: creation, panels of patterns, empty pages, and pages of runs and experiments."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import Team, User
from orchestrator.dashboards import services
from orchestrator.dashboards.models import Dashboard
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(owner: User) -> Run:
    runs.experiment_create(owner=owner, name="question")
    run = runs.run_submit(
        owner=owner, name="first", spec={"kind": "external"}, experiment="question"
    )
    names = ("loss", "val_loss", "grad_norm", "layer/0", "layer/1", "<script>")
    values: dict[str, Any] = {name: float for name in names}
    points = batch_of(run, [1, 2, 3], **values)
    telemetry.points_store(run=run, attempt=1, batches=[points])
    return run


def test_a_chart_is_added_to_a_new_and_to_an_existing_dashboard(owner: User, run: Run) -> None:
    client = factories.client_for(owner)
    form = client.get(f"/dashboards/add/?run={run.pk}").content.decode()
    assert "for this run" in form and "for the experiment question" in form
    panel = {
        "id": "loss",
        "kind": "line",
        "metrics": ["loss"],
        "x": "tokens",
        "runs": {"runs": [str(run.pk)]},
    }
    typed = {"panel": json.dumps(panel), "title": "Loss", "runs": "chart", "pinned": "on"}
    new = {"target": f"run:{run.pk}", "name": "Charts"}
    answer = client.post("/dashboards/add/", {**typed, **new}).json()
    row = Dashboard.objects.get()
    assert (row.run, answer["url"]) == (run, f"/dashboards/{row.pk}/")
    assert row.document["panels"] == [{**panel, "title": "Loss", "pinned": True}]
    again = {**typed, "target": str(row.pk), "runs": "dashboard", "pinned": ""}
    assert client.post("/dashboards/add/", again).status_code == 200
    row.refresh_from_db()
    _first, second = row.document["panels"]
    assert (second["id"], "runs" in second, "pinned" in second) == ("loss-2", False, False)
    page = client.get(f"/runs/{run.pk}/").content.decode()
    assert "pinned-title" in page and [one["title"] for one in specs(page)] == ["Loss"]
    assert 'data-act="dashboard"' in page
    wrong = client.post("/dashboards/add/", {**again, "panel": "loss"})
    assert wrong.status_code == 422 and "not a JSON object" in wrong.json()["detail"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": {"runs": []}}, "exactly one of runs"),
        ({"metrics": [f"layer/{n}" for n in range(51)]}, "more than 50"),
        ({}, "at most 100 panels"),
    ],
)
def test_a_panel_that_fits_no_dashboard_is_refused(
    owner: User, change: dict[str, Any], message: str
) -> None:
    panel = {"id": "loss", "kind": "line", "metrics": ["loss"]}
    full = DashboardSpec.from_dict({"panels": [{**panel, "id": f"p{n}"} for n in range(100)]})
    row = services.dashboard_create(owner=owner, name="Full", spec=full)
    typed = {"panel": json.dumps({**panel, **change}), "runs": "chart", "target": str(row.pk)}
    answer = factories.client_for(owner).post("/dashboards/add/", typed)
    assert answer.status_code == 422 and message in answer.json()["detail"]
    row.refresh_from_db()
    assert len(row.document["panels"]) == 100


def test_pinned_panels_of_a_team_are_on_its_page(owner: User, run: Run) -> None:
    client = factories.client_for(owner)
    team = Team.objects.get(memberships__user=owner)
    panel = {"id": "loss", "kind": "line", "metrics": ["loss"], "pinned": True}
    services.dashboard_create(
        owner=owner, name="Team", spec=DashboardSpec.from_dict({"panels": [panel]}), team=team
    )
    page = client.get(f"/account/teams/{team.pk}/").content.decode()
    assert [one["metrics"] for one in specs(page)] == [["loss"]]
    assert "webui/css/panels.css" in page


def test_viewers_add_no_panels(run: Run, stranger: User) -> None:
    client = factories.client_for(stranger)
    assert client.get("/dashboards/add/").status_code == 403


def specs(page: str) -> list[dict[str, Any]]:
    """The panels of a page."""
    texts = re.findall(r'data-panel-spec="([^"]+)"', page)
    return [json.loads(html.unescape(text)) for text in texts]


def make(owner: User, *panels: dict[str, Any], **subject: Any) -> Dashboard:
    spec = DashboardSpec.from_dict({"panels": list(panels)})
    return services.dashboard_create(owner=owner, name="mine", spec=spec, **subject)


def test_a_suggested_dashboard_shows_what_the_runs_log(run: Run, owner: User) -> None:
    client = factories.client_for(owner)
    form = client.get(f"/dashboards/new/?experiment={run.experiment_id}").content.decode()
    assert "The experiment question" in form
    assert "The team lab" in form
    typed = {"name": "Mine", "subject": f"experiment:{run.experiment_id}", "start": "suggested"}
    made = client.post("/dashboards/new/", typed)
    assert made["Location"].endswith("?edit=1")
    page = client.get(made["Location"]).content.decode()
    shown = specs(page)
    assert [spec["metrics"] for spec in shown[:3]] == [["loss"], ["val_loss"], ["grad_norm"]]
    assert shown[-1]["kind"] == "table"
    assert "Move loss up" in page
    unnamed = client.post("/dashboards/new/", {"name": " ", "subject": ""})
    assert unnamed.status_code == 422
    assert "a dashboard&#x27;s name has 1 to 120 characters" in unnamed.content.decode()
    wrong = client.post("/dashboards/new/", {"name": "x", "subject": "fleet:1"})
    assert wrong.status_code == 422


def test_a_pattern_is_expanded_on_the_page_and_not_in_the_editor(run: Run, owner: User) -> None:
    pinned = {"id": "c", "kind": "markdown", "text": "<b>*note*</b>", "pinned": True}
    row = make(owner, {"id": "a", "kind": "line", "pattern": "^layer/"}, pinned, run=run)
    client = factories.client_for(owner)
    page = client.get(f"/dashboards/{row.pk}/").content.decode()
    shown = specs(page)
    assert [spec["kind"] for spec in shown] == ["markdown", "line", "line"]  # pinned ones first
    assert [spec["metrics"] for spec in shown[1:]] == [["layer/0"], ["layer/1"]]
    assert "&lt;b&gt;<em>note</em>&lt;/b&gt;" in page
    editor = client.get(f"/dashboards/{row.pk}/?edit=1").content.decode()
    assert [spec["id"] for spec in specs(editor)] == ["c", "a"]
    slot = client.get(f"/dashboards/{row.pk}/panels/a/").content.decode()
    assert 'data-slot="a"' in slot
    assert client.get(f"/dashboards/{row.pk}/panels/x/").status_code == 404


def test_a_name_of_a_metric_is_escaped(run: Run, owner: User) -> None:
    row = make(owner, {"id": "a", "kind": "line", "pattern": "script"}, run=run)
    page = factories.client_for(owner).get(f"/dashboards/{row.pk}/").content.decode()
    assert [spec["metrics"] for spec in specs(page)] == [["<script>"]]
    assert "<h2 data-panel-title>&lt;script&gt;</h2>" in page


def test_pages_without_panels_say_what_to_do(run: Run, people: factories.People) -> None:
    def page(user: User, address: str) -> str:
        return factories.client_for(user).get(address).content.decode()

    assert "New dashboard" in page(people.owner, "/dashboards/")
    assert "Dashboards of your teams appear here" in page(people.stranger, "/dashboards/")
    row = make(people.owner, run=run)
    assert "Edit the dashboard to add charts" in page(people.owner, f"/dashboards/{row.pk}/")
    assert "Its owner has not added panels" in page(
        people.teammate, f"/dashboards/{row.pk}/?edit=1"
    )
    assert "No matches" in page(people.owner, "/dashboards/?q=nothing")


def test_a_run_is_shown_by_the_nearest_dashboard(run: Run, owner: User) -> None:
    client = factories.client_for(owner)
    address = f"/runs/{run.pk}/?tab=dashboards"
    assert f"/dashboards/new/?run={run.pk}" in client.get(address).content.decode()
    line = {"id": "a", "kind": "line", "metrics": ["loss"]}
    make(owner, line, team=Team.objects.get(name="lab"))
    own = make(owner, {**line, "id": "b"}, experiment=run.experiment)
    make(owner, {**line, "id": "c"}, run=factories.external_run(owner))  # of another run
    page = client.get(address).content.decode()
    assert [spec["id"] for spec in specs(page)] == ["b"]
    assert f'{{"runs": ["{run.pk}"]}}' in page
    assert page.count("<option value=") == 2
    assert f"/dashboards/{own.pk}/?edit=1" in page


def test_pinned_panels_are_on_the_page_of_their_experiment(run: Run, owner: User) -> None:
    panels: list[dict[str, Any]] = [
        {"id": "a", "kind": "line", "metrics": ["loss"], "pinned": True},
        {"id": "b", "kind": "line", "metrics": ["val_loss"]},
    ]
    row = make(owner, *panels, experiment=run.experiment)
    page = factories.client_for(owner).get(f"/experiments/{run.experiment_id}/").content.decode()
    assert [spec["metrics"] for spec in specs(page)] == [["loss"]]
    assert f'href="/dashboards/{row.pk}/"' in page


def test_copies_and_deletion(run: Run, people: factories.People) -> None:
    row = make(people.owner, {"id": "a", "kind": "markdown", "text": "x"}, run=run)
    teammate = factories.client_for(people.teammate)
    assert teammate.post(f"/dashboards/{row.pk}/delete/").status_code == 403
    copied = teammate.post(f"/dashboards/{row.pk}/copy/")
    made = Dashboard.objects.get(name="Copy of mine")
    assert copied["Location"] == f"/dashboards/{made.pk}/?edit=1"
    assert (made.owner, made.run, made.document) == (people.teammate, run, row.document)
    client: Client = factories.client_for(people.owner)
    gone = client.post(f"/dashboards/{row.pk}/delete/", follow=True).content.decode()
    assert "The dashboard mine is deleted." in gone


def test_a_page_with_many_patterns_reads_the_names_once(
    run: Run, owner: User, django_assert_max_num_queries: Any
) -> None:
    row = make(
        owner,
        *(
            {"id": f"p{number}", "kind": "line", "pattern": f"^layer/{number}"}
            for number in range(20)
        ),
        run=run,
    )
    client = factories.client_for(owner)
    client.get(f"/dashboards/{row.pk}/")
    with django_assert_max_num_queries(14):
        page = client.get(f"/dashboards/{row.pk}/").content.decode()
    assert len(specs(page)) == 20
