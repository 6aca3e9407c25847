"""Filters, order, groups and views of the runs table, through REST."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


def numbers(client: Client, runs: list[Run], **query: object) -> list[int]:
    """The runs of a list, by their place in `runs`, over all its pages."""
    ids, shown, cursor = [run.pk for run in runs], list[int](), ""
    while True:
        answer = client.get("/api/v1/runs", {**query, "cursor": cursor, "limit": 2})
        assert answer.status_code == 200, answer.content
        shown += [ids.index(int(item["id"])) for item in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
        if cursor is None:
            return shown


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ('lr >= 1e-3 and loss < 2.5 and model = "llama-tiny"', [2]),
        ("loss > 1.5", [2, 0]),
        ("min(loss) = 0 and not lr = 1e-4", [2, 0]),
        ("mean(loss) <= 0.5 or max(loss) = 3", [1, 0]),
        ("loss = none", [3]),
        ("lr in (1e-4, 1e-3)", [1, 0]),
        ("lr != 0.01", [1, 0]),
        ("name ~ 'RUN 3' or name = 'run 0'", [3, 0]),
        ("tag = all and model ~ 15M", [0]),
        ("age < 1h and created > 2020-01-01 and state = queued and devices = 1", [3, 2, 1, 0]),
        ("experiment = none and duration > 5m", []),
        ("optimizer.lr > 0.005 and config.train.steps = 20", [3, 2]),
    ],
)
def test_queries_filter_by_any_value(
    owner: User, runs: list[Run], query: str, expected: list[int]
) -> None:
    assert numbers(factories.api(owner), runs, query=query) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("loss", [1, 2, 0, 3]),
        ("-loss", [0, 2, 1, 3]),
        ("-mean(loss)", [0, 2, 1, 3]),
        ("min(loss)", [0, 1, 2, 3]),
        ("lr", [1, 0, 2, 3]),
        ("-lr", [3, 2, 0, 1]),
        ("name", [0, 1, 2, 3]),
        ("-created", [3, 2, 1, 0]),
        ("age", [3, 2, 1, 0]),
        ("started", [3, 2, 1, 0]),
        ("-model", [3, 2, 1, 0]),
        ("train.optimizer.lr", [1, 0, 2, 3]),
    ],
)
def test_pages_in_the_order_of_any_column(
    owner: User, runs: list[Run], sort: str, expected: list[int]
) -> None:
    assert numbers(factories.api(owner), runs, sort=sort) == expected
    assert numbers(factories.api(owner), runs, sort=sort, query="lr > 1e-4") == [
        number for number in expected if number != 1
    ]


def test_errors_show_the_place_and_the_nearest_name(owner: User, runs: list[Run]) -> None:
    client = factories.api(owner)
    answer = client.get("/api/v1/runs", {"query": "lr > 1 and los < 2"})
    problem = answer.json()
    assert answer.status_code == 422
    assert problem["errors"] == [
        {
            "field": "query",
            "message": "at character 12: no run has a value 'los'",
            "hint": "Use 'loss'.",
        }
    ]
    assert problem["detail"].split("\n")[1:] == ["lr > 1 and los < 2", "           ^"]
    for query in ("lr < big", "state < 3", "created > soon", "age < 3 parsecs", "loss ~ 3"):
        assert client.get("/api/v1/runs", {"query": query}).status_code == 422, query
    for sort in ("tag", "unknown", "min(lr)"):
        assert client.get("/api/v1/runs", {"sort": sort}).status_code == 422, sort
    assert client.get("/api/v1/runs", {"sort": "loss", "cursor": "x"}).status_code == 422


def test_names_and_runs_of_others_stay_hidden(owner: User, stranger: User, runs: list[Run]) -> None:
    client = factories.api(stranger)
    names = {item["name"] for item in client.get("/api/v1/runs/columns").json()["items"]}
    assert "state" in names and not {"loss", "train.optimizer.lr"} & names
    assert client.get("/api/v1/runs", {"query": "loss < 9"}).status_code == 422
    mine = factories.api(owner).get("/api/v1/runs/columns").json()["items"]
    assert {"name": "loss", "source": "metric", "type": "number"} in mine
    assert numbers(factories.api(owner), runs, sort="loss", query="owner = other") == []


def test_a_group_has_at_most_40_numbers_and_joins_each_metric_once(owner: User) -> None:
    client = factories.client_for(owner)
    run = factories.external_run(owner)
    values: dict[str, Any] = {f"m{n}": lambda step: float(step) for n in range(41)}
    telemetry.points_store(run=run, attempt=1, batches=[batch_of(run, [1, 2], **values)])
    telemetry.summaries_refresh(limit=10, wait=False)
    columns = [f"{kind}(m0)" for kind in ("min", "max", "mean")] + [f"m{n}" for n in range(1, 38)]
    with CaptureQueriesContext(connection) as queries:
        answer = client.get("/api/v1/runs/groups", {"by": "state", "columns": ",".join(columns)})
    [group] = answer.json()["items"]
    assert [group["spreads"][key]["mean"] for key in columns[:4]] == [1.0, 2.0, 1.5, 2.0]
    joins = [query["sql"].count(" JOIN ") for query in queries if "group_runs" in query["sql"]]
    assert joins == [38]
    more = client.get("/api/v1/runs/groups", {"by": "state", "columns": ",".join(values)})
    assert more.status_code == 422 and more.json()["errors"][0]["field"] == "columns"


def test_groups_have_aggregates(owner: User, runs: list[Run]) -> None:
    client = factories.api(owner)
    answer = client.get("/api/v1/runs/groups", {"by": "model", "columns": "loss,lr"}).json()
    assert answer["items"] == [
        {
            "value": "llama-tiny",
            "count": 3,
            "spreads": {
                "loss": {"mean": 1.5, "min": 1.0, "max": 2.0},
                "train.optimizer.lr": {"mean": pytest.approx(0.0067), "min": 1e-4, "max": 0.01},
            },
        },
        {
            "value": "llama-15m",
            "count": 1,
            "spreads": {
                "loss": {"mean": 3.0, "min": 3.0, "max": 3.0},
                "train.optimizer.lr": {"mean": 1e-3, "min": 1e-3, "max": 1e-3},
            },
        },
    ]
    by_lr = client.get("/api/v1/runs/groups", {"by": "lr", "query": "loss < 9"}).json()["items"]
    assert {item["value"]: item["count"] for item in by_lr} == {"0.001": 1, "0.0001": 1, "0.01": 1}
    assert client.get("/api/v1/runs/groups", {"by": "loss"}).status_code == 422


def test_views_are_shared_with_a_team(people: factories.People) -> None:
    mine = factories.api(people.owner)
    body = {"name": "best", "query": "?sort=loss&page=3&columns=lr", "team": "lab"}
    saved = mine.post("/api/v1/run-views", body, content_type="application/json")
    assert saved.status_code == 201 and saved.json()["query"] == "sort=loss&columns=lr"
    again = mine.post("/api/v1/run-views", {**body, "team": ""}, content_type="application/json")
    assert again.json()["id"] == saved.json()["id"], "the same name replaces"
    other = factories.api(people.teammate)
    assert other.get("/api/v1/run-views").json()["items"] == []
    mine.post("/api/v1/run-views", body, content_type="application/json")
    assert [item["name"] for item in other.get("/api/v1/run-views").json()["items"]] == ["best"]
    path = f"/api/v1/run-views/{saved.json()['id']}"
    assert other.delete(path).status_code == 403
    assert factories.api(people.operator).delete(path).status_code == 404
    foreign = {"name": "x", "query": "", "team": "unknown"}
    assert (
        mine.post("/api/v1/run-views", foreign, content_type="application/json").status_code == 422
    )
    assert mine.delete(path).status_code == 204
