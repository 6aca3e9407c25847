"""Series for charts, exports and programs."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.orchestrator.api.test_middleware import problem
from workers.contracts.wire.points import PointBatch

STEPS = 3000
SPIKE = 1234


@pytest.fixture
def run(owner: User) -> Run:
    """An external run with 3000 steps of a falling loss that has one spike and one NaN."""
    made = factories.runs.run_submit(
        owner=owner, name="watched", spec={"kind": "external", "model": "llama-tiny"}
    )
    loss = [5 * math.exp(-step / 1000) for step in range(1, STEPS + 1)]
    loss[SPIKE - 1], loss[2000 - 1] = 99.0, math.nan
    steps = list(range(1, STEPS + 1))
    batch = PointBatch(
        run=str(made.pk),
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=[2048 * step for step in steps],
        time=[1790000000.0 + step for step in steps],
        values={"loss": loss},
    )
    telemetry.points_store(run=made, attempt=1, batches=[batch])
    return made


@pytest.mark.django_db
def test_a_chart_keeps_its_spikes(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}/series"
    answer = client.get(f"{path}?name=loss&points=200").json()
    assert set(answer) >= {
        "name",
        "unit",
        "rank",
        "axis",
        "x",
        "y",
        "low",
        "high",
        "total_points",
        "last_seq",
    }
    assert (answer["name"], answer["unit"], answer["axis"]) == ("loss", "nats/token", "step")
    assert (answer["total_points"], answer["last_seq"]) == (STEPS, STEPS)
    assert len(answer["x"]) == len(answer["y"]) == len(answer["low"]) == len(answer["high"]) <= 200
    assert 99.0 in answer["y"] and answer["x"][answer["y"].index(99.0)] == SPIKE
    assert client.get(f"{path}?name=loss&points=5000").json()["y"].count("NaN") == 1
    part = client.get(f"{path}?name=loss&x=tokens&from={2048 * 11}&to={2048 * 20}").json()
    assert part["x"] == [2048 * step for step in range(11, 21)]
    late = client.get(f"{path}?name=loss&after_seq=2990&x=time").json()
    assert late["x"] == [1790000000.0 + step for step in range(2991, STEPS + 1)]
    empty = client.get(f"{path}?name=val_loss").json()
    assert (empty["x"], empty["y"], empty["total_points"]) == ([], [], 0)
    result = {"name": "loss", "unit": "nats/token", "ranks": [0], "attempts": [1], "points": STEPS}
    assert client.get(path).json() == {"items": [result], "next_cursor": None}


@pytest.mark.django_db
def test_exports_hold_every_point(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}/series"
    raw = client.get(f"{path}?name=loss&raw=1")
    assert raw["Content-Type"].startswith("application/json")
    answer = json.loads(raw.getvalue())
    assert answer["x"] == list(range(1, STEPS + 1))
    assert (answer["y"][SPIKE - 1], answer["y"][1999], answer["total_points"]) == (
        99.0,
        "NaN",
        STEPS,
    )
    assert json.loads(client.get(f"{path}?name=nothing&raw=1").getvalue())["x"] == []
    drawn = client.get(f"{path}?name=loss&x=flops&points=5000").json()["x"]
    assert json.loads(client.get(f"{path}?name=loss&x=flops&raw=1").getvalue())["x"] == drawn
    assert drawn[0] / 2048 > 1e6, "model FLOPs a token of the model that the spec names"

    def rows(response: Any) -> list[list[str]]:
        assert response["Content-Type"].startswith("text/csv")
        return list(
            csv.reader(
                io.StringIO(response.getvalue().decode() if response.streaming else response.text)
            )
        )

    accept = {"Accept": "text/csv"}
    head, *points = rows(client.get(f"{path}?name=loss&raw=1&rank=0", headers=accept))
    assert head == ["attempt", "rank", "seq", "step", "tokens", "time", "value"]
    assert len(points) == STEPS
    assert points[SPIKE - 1] == [
        "1",
        "0",
        "1234",
        "1234",
        str(2048 * SPIKE),
        "1790001234.0",
        "99.0",
    ]
    head, *points = rows(client.get(f"{path}?name=loss&points=100", headers=accept))
    assert head == ["step", "loss", "low", "high"] and len(points) <= 100
    assert rows(client.get(path, headers=accept)) == [
        ["name", "unit", "points"],
        ["loss", "nats/token", "3000"],
    ]


@pytest.mark.django_db
def test_wrong_parameters_are_named(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}/series"
    for query, field in (
        ("points=5001", "points"),
        ("points=0", "points"),
        ("points=some", "points"),
        ("x=epoch", "x"),
        ("rank=-1", "rank"),
        ("rank=99999999999999999999", "rank"),
        ("after_seq=-2", "after_seq"),
        ("from=yesterday", "from"),
    ):
        result = problem(client.get(f"{path}?name=loss&{query}"), 422, "invalid")
        assert [item["field"] for item in result["errors"]] == [field], result
    shapeless = factories.external_run(owner)
    for query in ("", "&raw=1"):
        for accept in ("application/json", "text/csv"):
            request = f"/api/v1/runs/{shapeless.pk}/series?name=loss&x=flops{query}"
            result = problem(client.get(request, headers={"Accept": accept}), 422, "invalid")
            assert result["errors"][0]["field"] == "x"
    training = factories.run(owner)
    flops = f"/api/v1/runs/{training.pk}/series?name=loss&x=flops"
    assert client.get(flops).json()["axis"] == "flops"
    assert json.loads(client.get(f"{flops}&raw=1").getvalue())["x"] == []


@pytest.mark.django_db
def test_several_metrics_in_one_answer(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}"
    answer = client.get(f"{path}/curves?name=loss&name=val_loss&points=100&digits=3").json()
    loss, missing = answer["items"]
    alone = client.get(f"{path}/series?name=loss&points=100").json()
    assert loss["x"] == alone["x"] and 99.0 in loss["high"]
    assert loss["y"] == [float(f"{float(y):.3g}") if y != "NaN" else y for y in alone["y"]]
    assert (missing["name"], missing["x"]) == ("val_loss", [])
    window = client.get(f"{path}/curves?name=loss&from=11&to=20").json()["items"][0]
    assert window["x"] == list(range(11, 21)) and "low" not in window
    for query in ("", "?name=loss&digits=1", "?" + "&".join(["name=loss"] * 41)):
        assert client.get(f"{path}/curves{query}").status_code == 422
