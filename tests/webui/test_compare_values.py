"""Values behind the charts of the Compare page."""

from __future__ import annotations

import pytest

from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.webui.test_run_numbers import ago, points
from webui.charts.parameter_importance import importances


def test_importance_names_its_method_and_runs() -> None:
    config = {
        "lr": [1e-4, 1e-3, 1e-2, 1e-1, 1.0, None],
        "model": ["a", "a", "a", "b", "b", "b"],
        "name": ["p", "q", "r", "s", "t", "u"],
        "noise": [3, 1, 2, 1, 3, 2],
    }
    ranked = importances(config, [5.0, 4.0, 3.0, 2.0, 1.0, 0.5])
    assert [one.name for one in ranked][:2] == ["lr", "model"], "each run has another name"
    lr, model = ranked[:2]
    assert (lr.strength, lr.direction, lr.runs, lr.method) == (pytest.approx(1), -1, 5, "spearman")
    assert 0.8 < model.strength < 1 and (model.direction, model.method) == (0, "groups")
    assert ranked[-1].name == "noise" and ranked[-1].strength < 0.5
    assert importances(config, [1.0] * 6) == []
    assert importances(config, [1.0, 2.0, None, None, None, None]) == []


@pytest.mark.django_db
def test_the_page_reads_values_metrics_and_errors(people: factories.People) -> None:
    runs = []
    for i in range(5):
        train = {"steps": 10, "seq_len": 128, "optimizer": {"name": "adamw", "lr": 10.0**-i}}
        run = factories.run(people.owner, train=train)
        run.prediction = {**(run.prediction or {}), "step_time_s": 0.5}
        run.save(update_fields=["prediction"])
        factories.running(run, factories.node(f"n{i}"))
        points(run, [ago(5).timestamp()] * 3, loss=[3.0, 2.0, 1.0 + i], step_time_s=[0.4] * 3)
        runs.append(run.pk)
    telemetry.summaries_refresh(wait=False)
    client = factories.client_for(people.owner)
    path = f"/runs/compare/values/?runs={','.join(map(str, runs))}"
    answer = client.get(f"{path}&metric=loss&aggregate=last").json()
    assert answer["config"]["train.optimizer.lr"] == [1.0, 0.1, 0.01, 0.001, 0.0001]
    assert answer["metrics"]["loss"]["last"] == [1, 2, 3, 4, 5]
    assert answer["metrics"]["loss"]["min"] == [1, 2, 2, 2, 2]
    assert answer["errors"]["step_time_s"] == [[0.5, 0.4]] * 5
    best = next(one for one in answer["importances"] if one["name"] == "train.optimizer.lr")
    assert (best["strength"], best["direction"]) == (pytest.approx(1), -1)
    assert client.get(f"{path}&metric=loss&aggregate=worst").status_code == 422
    assert factories.client_for(people.stranger).get(path).status_code == 404
    page = client.get(f"/runs/compare/?runs={runs[0]},{runs[1]}").content.decode()
    assert "data-baseline" in page and "parameter importance" in page
