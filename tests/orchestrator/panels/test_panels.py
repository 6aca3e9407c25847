"""Panels: their JSON, the panels of a pattern, their data, and who sees it, through REST."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import Team, User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from orchestrator.tracking import media
from orchestrator.tracking import services as tracking
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def runs(owner: User) -> list[Run]:
    """Three runs with losses that end at 3, 1 and 2, a learning rate, and media of the first."""
    made = []
    for number, last in enumerate((3.0, 1.0, 2.0)):
        run = factories.external_run(owner, name=f"run {number}")
        values: dict[str, Any] = {
            "loss": lambda step, last=last: last + 10 - step,
            "val/loss": lambda step, last=last: last,
            "odd": lambda step: float("nan"),
        }
        points = batch_of(run, range(1, 11), **values)
        telemetry.points_store(run=run, attempt=1, batches=[points])
        tracking.details_update(run=run, changes=[{"config": {"lr": 10.0**-number}}])
        made.append(run)
    for step in (1, 5):
        counts = {"counts": [1, step, 2], "edges": [0, 1, 2, 3]}
        items = [
            ("weights", "histogram", counts),
            ("answer", "text", f"text of step {step}"),
            ("examples", "table", {"columns": ["prompt"], "rows": [[f"row of {step}"]]}),
        ]
        tracking.media_store(
            run=made[0],
            items=[
                media.check(
                    name=name, kind=kind, step=step, index=0, caption="", time=0.0, data=data
                )
                for name, kind, data in items
            ],
        )
    factories.image_item(made[0])
    return made


def source(runs: list[Run], *places: int) -> dict[str, Any]:
    return {"runs": [str(runs[place].pk) for place in places or range(len(runs))]}


def data(client: Client, subject: dict[str, Any] | None, **panel: Any) -> dict[str, Any]:
    body = {"panel": {"id": "p", **panel}, "subject": subject}
    answer = client.post("/api/v1/panels/data", body, content_type="application/json")
    assert answer.status_code == 200, answer.content
    result: dict[str, Any] = answer.json()
    return result


def test_lines_of_several_runs(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)
    drawn = data(client, source(runs), kind="line", metrics=["loss", "nothing"])
    assert [curve["y"][-1] for curve in drawn["content"]["curves"]] == [3.0, 1.0, 2.0]
    assert drawn["missing"] == ["nothing"]
    assert drawn["empty"] is None
    assert drawn["active"]
    window = data(client, source(runs), kind="line", metrics=["loss"], x_min=4, x_max=6)
    assert [curve["x"] for curve in window["content"]["curves"]] == [[4, 5, 6]] * 3
    elapsed = data(client, source(runs), kind="line", metrics=["loss"], x="time")
    assert elapsed["content"]["axis"] == "elapsed"
    assert elapsed["content"]["curves"][2]["x"][:2] == [0, 1]
    alone = data(client, source(runs, 0), kind="line", metrics=["loss"], x="time")
    assert (alone["content"]["axis"], alone["content"]["curves"][0]["x"][0]) == ("time", 1001.0)


def test_numbers_per_run(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)
    bars = data(client, source(runs), kind="bar", metrics=["loss"], aggregate="max")
    assert [bar["value"] for bar in bars["content"]["bars"]] == [12.0, 10.0, 11.0]
    assert bars["content"]["aggregate"] == "max"
    dots = data(client, source(runs), kind="scatter", metrics=["loss"], x_metric="config.lr")
    points = [(point["x"], point["y"]) for point in dots["content"]["points"]]
    assert points == [(1.0, 3.0), (0.1, 1.0), (0.01, 2.0)]
    steps = data(client, source(runs, 1), kind="scatter", metrics=["loss"], x_metric="val/loss")
    assert (steps["content"]["over"], len(steps["content"]["points"])) == ("steps", 10)
    spread = data(client, source(runs), kind="histogram", metrics=["loss"], bins=2)
    assert (spread["content"]["counts"], spread["content"]["over"]) == ([1, 2], "runs")
    alone = data(client, source(runs, 0), kind="histogram", metrics=["loss"], bins=5)
    assert (sum(alone["content"]["counts"]), alone["content"]["over"]) == (10, "steps")
    table = data(client, source(runs), kind="table", metrics=["loss"], columns=["state", "lost"])
    assert table["content"]["rows"][1]["cells"] == ["running", 1.0]
    assert table["content"]["missing"] == ["lost"]


def test_heat_maps(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)
    heat = data(client, source(runs, 0), kind="heatmap", pattern="loss$", combine=True)
    assert [row["metric"] for row in heat["content"]["rows"]] == ["loss", "val/loss"]
    assert heat["content"]["z"][0] == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3]
    logged = data(client, source(runs), kind="heatmap", metrics=["weights"])
    assert (logged["content"]["of"], logged["content"]["x"]) == ("histograms", [1, 5])
    totals = [sum(column) for column in zip(*logged["content"]["z"], strict=True)]
    assert totals == pytest.approx([4, 8])


def test_media(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)
    newest = data(client, source(runs), kind="text", metrics=["answer"])["content"]
    assert [item["data"] for item in newest["items"]] == ["text of step 5"]
    assert newest["steps"] == [1, 5]
    earlier = data(client, source(runs), kind="text", metrics=["answer"], step=4)["content"]
    assert [item["data"] for item in earlier["items"]] == ["text of step 1"]
    image = data(client, source(runs), kind="image", metrics=["sample"])["content"]["items"][0]
    assert client.get(image["image"]["url"]).status_code == 200
    table = data(client, source(runs), kind="table", metrics=["examples"])["content"]
    assert table["items"][0]["data"] == {"columns": ["prompt"], "rows": [["row of 5"]], "more": 0}
    bins = data(client, source(runs), kind="histogram", metrics=["weights"])["content"]
    assert bins["items"][0]["data"]["counts"] == [1, 5, 2]


@pytest.mark.parametrize(
    ("panel", "code", "subject"),
    [
        ({"kind": "line", "metrics": ["lossy"]}, "gone", "lossy"),
        ({"kind": "image", "metrics": ["picture"]}, "gone", "picture"),
        ({"kind": "bar", "metrics": ["odd"]}, "no_points", "odd"),
        ({"kind": "line", "metrics": ["loss"], "x": "flops"}, "no_axis", "flops"),
        ({"kind": "line", "pattern": "^x", "combine": True}, "no_match", "^x"),
        ({"kind": "scatter", "metrics": ["loss"], "x_metric": "config.lrs"}, "gone", "config.lrs"),
        ({"kind": "line", "metrics": ["loss"], "runs": {"runs": ["999"]}}, "no_source", ""),
        ({"kind": "line", "metrics": ["loss"], "runs": {"team": "999"}}, "no_source", ""),
        (
            {"kind": "line", "metrics": ["loss"], "runs": {"query": "loss > 99"}},
            "no_runs",
            "loss > 99",
        ),
        ({"kind": "line", "metrics": ["loss"], "runs": {"query": "a ! b"}}, "bad_query", "a ! b"),
    ],
)
def test_reasons_to_show_nothing(
    panel: dict[str, Any], code: str, subject: str, runs: list[Run], owner: User
) -> None:
    telemetry.summaries_refresh(limit=10, wait=False)
    drawn = data(factories.api(owner), source(runs), **panel)
    assert (drawn["empty"]["code"], drawn["empty"]["subject"]) == (code, subject)


def test_the_nearest_name_is_offered(runs: list[Run], owner: User) -> None:
    drawn = data(factories.api(owner), source(runs), kind="line", metrics=["val_loss"])
    assert drawn["empty"]["near"] == "val/loss"


def test_only_runs_that_the_viewer_sees(runs: list[Run], owner: User, teammate: User) -> None:
    stranger = factories.user("outsider")
    hidden = factories.external_run(stranger)
    chosen = {"runs": [str(runs[0].pk), str(hidden.pk)]}
    panel: dict[str, Any] = {"kind": "line", "metrics": ["loss"]}
    for user in (owner, teammate):
        drawn = data(factories.api(user), chosen, **panel)
        assert [run["id"] for run in drawn["runs"]] == [str(runs[0].pk)]
        assert drawn["hidden_runs"] == 1
    team = {"team": str(Team.objects.get(name="lab").pk)}
    assert len(data(factories.api(teammate), team, **panel)["runs"]) == 3
    for subject in (source(runs), team):
        drawn = data(factories.api(stranger), subject, **panel)
        assert (drawn["runs"], drawn["empty"]["code"]) == ([], "no_source")
    query = data(factories.api(stranger), {"query": "kind = external"}, **panel)
    assert [run["id"] for run in query["runs"]] == [str(hidden.pk)]


def test_a_pattern_makes_a_panel_per_match(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)
    panel = {"id": "p", "kind": "line", "pattern": "loss", "title": "Losses", "y_log": True}
    body = {"panel": panel, "subject": source(runs)}
    answer = client.post("/api/v1/panels/expand", body, content_type="application/json").json()
    assert [each["metrics"] for each in answer["panels"]] == [["loss"], ["val/loss"]]
    assert [each["title"] for each in answer["panels"]] == ["Losses: loss", "Losses: val/loss"]
    assert all(each["y_log"] for each in answer["panels"])
    assert len({each["id"] for each in answer["panels"]}) == 2
    again = client.post("/api/v1/panels/expand", body, content_type="application/json").json()
    assert again == answer


def test_matches_above_the_limit_are_counted(owner: User) -> None:
    run = factories.external_run(owner)
    names: dict[str, Any] = {f"layer_{number:03}": float for number in range(60)}
    telemetry.points_store(run=run, attempt=1, batches=[batch_of(run, [1], **names)])
    client, subject = factories.api(owner), source([run])
    body = {"panel": {"id": "p", "kind": "line", "pattern": "^layer"}, "subject": subject}
    answer = client.post("/api/v1/panels/expand", body, content_type="application/json").json()
    assert (len(answer["panels"]), answer["matches"], answer["left_out"]) == (50, 60, 10)
    combined = data(client, subject, kind="bar", pattern="^layer", combine=True)
    assert (len(combined["content"]["bars"]), combined["content"]["left_out"]) == (50, 10)


def test_search_of_names(runs: list[Run], owner: User) -> None:
    client = factories.api(owner)

    def search(**body: Any) -> Any:
        return client.post("/api/v1/panels/names", body, content_type="application/json")

    assert search(runs=source(runs)).json()["items"] == ["loss", "odd", "val/loss"]
    assert search(runs=source(runs), pattern="(?i)LOSS$").json()["total"] == 2
    assert search(runs=source(runs), kind="image").json()["items"] == ["sample"]
    assert "weights" in search(runs=source(runs), kind="heatmap").json()["items"]
    refused = search(runs=source(runs), pattern="loss(")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["message"] == (
        "at character 5: this parenthesis is not closed"
    )
    assert refused.json()["detail"].splitlines()[1:] == ["loss(", "    ^"]


@pytest.mark.parametrize(
    ("panel", "field", "message"),
    [
        ({"kind": "pie", "metrics": ["loss"]}, "panel.kind", "'pie' is not one of"),
        ({"kind": "line"}, "panel.metrics", "a panel of kind line shows no metric"),
        ({"kind": "line", "pattern": "a["}, "panel.pattern", "at character 2 of 'a['"),
        ({"kind": "line", "metrics": ["a"], "pattern": "a"}, "panel.pattern", "not both"),
        ({"kind": "scatter", "metrics": ["a"]}, "panel.x_metric", "has no x axis"),
        ({"kind": "bar", "metrics": ["a"], "y_min": 2, "y_max": 1}, "panel.y_max", "not above"),
        ({"kind": "line", "metrics": ["a"], "y_log": True, "y_min": 0}, "panel.y_min", "positive"),
        ({"kind": "line", "metrics": ["a"], "color": 1}, "panel.color", "is not a field"),
        ({"kind": "line", "metrics": ["a"], "runs": {"limit": 3}}, "panel.runs", "exactly one"),
        ({"kind": "line", "metrics": ["a"] * 51}, "panel.metrics", "more than 50 entries"),
    ],
)
def test_panels_that_are_refused(
    panel: dict[str, Any], field: str, message: str, owner: User
) -> None:
    body = {"panel": {"id": "p", **panel}}
    answer = factories.api(owner).post("/api/v1/panels/data", body, content_type="application/json")
    assert answer.status_code == 422
    errors = answer.json()["errors"]
    assert [error["field"] for error in errors] == [field]
    assert message in errors[0]["message"]
