"""Limits of ingest by REST: metric names, values, nesting, bodies of known events."""

from __future__ import annotations

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run, RunEvent
from tests import factories
from tests.orchestrator.api.test_ingest import point, send
from tests.orchestrator.api.test_middleware import problem
from workers.contracts.wire import points as wire

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(owner: User) -> Run:
    return factories.external_run(owner)


@pytest.fixture
def client(owner: User) -> Client:
    return factories.api(owner)


def test_a_point_has_at_most_1000_names(client: Client, run: Run) -> None:
    path = f"/api/v1/runs/{run.pk}/points"
    many = {f"metric/{number}": 1.0 for number in range(100_000)}
    answer = problem(send(client, path, [point(1, values=many)]), 422, "too-many-names")
    assert "points.0.values has 100000 names" in answer["detail"]
    exactly = {f"metric/{number}": 1.0 for number in range(1000)}
    assert send(client, path, [point(1, values=exactly)]).json()["accepted"] == 1


def test_a_run_has_a_limited_number_of_names(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/api/v1/runs/{run.pk}/points"
    monkeypatch.setattr("orchestrator.api.ingest.MAX_NAMES_PER_RUN", 3)
    assert send(client, path, [point(1, values={"a": 1, "b": 2})]).status_code == 200
    new = [point(2, values={"a": 1, "c": 2}), point(3, values={"d": 2})]
    answer = problem(send(client, path, new), 422, "too-many-names")
    assert "would have 4 metric names" in answer["detail"]
    assert send(client, path, [point(2, values={"a": 1, "c": 2})]).json()["accepted"] == 1


def test_sparse_points_do_not_exhaust_memory(client: Client, run: Run) -> None:
    sparse = [point(seq, values={f"metric/{seq}": 1.0}) for seq in range(1, 3001)]
    path = f"/api/v1/runs/{run.pk}/points"
    problem(send(client, path, sparse), 422, "too-many-names")


def test_a_name_that_is_too_long_is_not_repeated(client: Client, run: Run) -> None:
    answer = send(client, f"/api/v1/runs/{run.pk}/points", [point(1, values={"n" * 10**6: 1.0})])
    [rejected] = answer.json()["rejected"]
    assert rejected["message"].startswith("values.nnn") and len(answer.content) < 1000


@pytest.mark.parametrize("value", [True, "1", None, [1], {}])
def test_only_numbers_are_values(client: Client, run: Run, value: object) -> None:
    answer = send(client, f"/api/v1/runs/{run.pk}/points", [point(1, values={"loss": value})])
    assert answer.json()["accepted"] == 0 and answer.json()["rejected"][0]["index"] == 0


def test_numbers_that_are_not_finite_have_names(client: Client, run: Run) -> None:
    values = {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    answer = send(client, f"/api/v1/runs/{run.pk}/points", [point(1, values=values)])
    assert answer.json()["accepted"] == 1


def test_nested_bodies_are_refused(client: Client, run: Run) -> None:
    path = f"/api/v1/runs/{run.pk}/events"
    for levels in (900, 5000):
        body = '[{"type": "note", "data": {"a": ' + "[" * levels + "]" * levels + "}}]"
        problem(send(client, path, body.encode()), 422, "nested-too-deep")
    inner: object = 1
    for _ in range(52):
        inner = [inner]
    answer = send(client, path, [{"type": "note", "data": {"a": inner}}]).json()
    assert "nested more than 50 levels" in answer["rejected"][0]["message"]


def test_bodies_of_known_events_are_validated(client: Client, run: Run) -> None:
    path = f"/api/v1/runs/{run.pk}/events"
    data = {"step": 5, "path": "runs/1/x", "tokens": [1]}
    answer = send(client, path, [{"type": "checkpoint_saved", "data": data}]).json()
    assert answer["accepted"] == 0 and "tokens" in answer["rejected"][0]["message"]
    assert not RunEvent.objects.filter(run=run, type="checkpoint_saved").exists()


def test_depth_counts_objects_and_lists() -> None:
    assert [wire.depth(data) for data in (1, {}, [[]], {"a": [{"b": 1}, 2]})] == [0, 1, 2, 3]
