"""Fleet, queue, experiments, tokens and audit log by REST."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import ApiToken, User
from orchestrator.api.schemas.runs import QueueOut
from orchestrator.fleet.models import JoinToken
from orchestrator.runs.models import Experiment
from tests import factories
from tests.orchestrator.api.test_middleware import problem
from tests.orchestrator.api.test_runs import patch, post
from workers.contracts.catalog.presets import PRESETS


@pytest.mark.django_db
def test_the_fleet_is_seen_and_operators_drain_it(owner: User, operator: User) -> None:
    for name in ("n1", "n2", "n3"):
        factories.node(name, devices=2)
    client, boss = factories.api(owner), factories.api(operator)
    first = client.get("/api/v1/nodes?limit=2").json()
    rest = client.get(f"/api/v1/nodes?cursor={first['next_cursor']}").json()
    assert [node["name"] for node in first["items"] + rest["items"]] == ["n1", "n2", "n3"]
    node = first["items"][0]
    assert (node["health"], node["pool"], node["drained"], len(node["devices"])) == (
        "up",
        "default",
        False,
        2,
    )
    assert (
        client.get(f"/api/v1/nodes/{node['id']}").json()
        == client.get("/api/v1/nodes/n1").json()
        == node
    )
    devices = client.get("/api/v1/devices?node=n1").json()["items"]
    result = [(device["node"], device["index"], device["kind"]) for device in devices]
    assert result == [("n1", 0, "cpu"), ("n1", 1, "cpu")]
    assert len(client.get("/api/v1/devices").json()["items"]) == 6
    [pool] = client.get("/api/v1/pools").json()["items"]
    assert (pool["name"], pool["node_count"], pool["device_count"]) == ("default", 3, 6)

    problem(post(client, "/api/v1/nodes/n1/drain"), 403, "role-refused")
    problem(post(boss, "/api/v1/nodes/n9/drain"), 404, "not-found")
    assert not client.get("/api/v1/nodes/n1").json()["drained"]
    drained = post(boss, "/api/v1/nodes/n1/drain", {"reason": "new fan"}).json()
    assert (drained["drained"], drained["drain_reason"]) == (True, "new fan")
    assert post(boss, "/api/v1/nodes/n1/undrain").json()["drained"] is False


@pytest.mark.django_db
def test_a_join_token_is_shown_once(owner: User, operator: User) -> None:
    problem(post(factories.api(owner), "/api/v1/join-tokens"), 403, "role-refused")
    assert not JoinToken.objects.exists()
    boss, key = factories.api(operator), {"Idempotency-Key": "k"}
    made = post(boss, "/api/v1/join-tokens", {"pool": "default"}, **key)
    assert made.status_code == 201 and made.json()["token"].count(".") == 1
    assert "://orrery-join:" in made.json()["redis_url"]
    problem(post(boss, "/api/v1/join-tokens", {"pool": "default"}, **key), 409, "secret-shown-once")
    problem(post(boss, "/api/v1/join-tokens", {"expires": "2001-01-01T00:00:00Z"}), 422, "invalid")
    assert JoinToken.objects.count() == 1


@pytest.mark.django_db
def test_waiting_runs_have_a_reason(owner: User, stranger: User) -> None:
    runs = [
        factories.run(owner, name=name, devices=devices)
        for name, devices in (("small", 1), ("large", 4))
    ]
    answer = factories.api(owner).get("/api/v1/queue").json()
    assert {entry["run"] for entry in answer["items"]} == {str(run.pk) for run in runs}
    for entry in answer["items"]:
        assert set(entry) >= {
            "run",
            "name",
            "position",
            "reason",
            "may_start",
            "devices",
            "queued_at",
        }
        assert len(entry["reason"].split()) >= 3, entry
        assert QueueOut.model_validate(entry).model_dump() == entry
    assert [entry["position"] for entry in answer["items"]] == [1, 2]
    first = factories.api(owner).get("/api/v1/queue?limit=1").json()
    rest = factories.api(owner).get(f"/api/v1/queue?cursor={first['next_cursor']}").json()
    assert first["items"] + rest["items"] == answer["items"]
    assert factories.api(stranger).get("/api/v1/queue").json()["items"] == []


@pytest.mark.django_db
def test_experiments_are_made_and_edited(owner: User, teammate: User, stranger: User) -> None:
    client, mate = factories.api(owner), factories.api(teammate)
    body = {"name": "Does warmup help?", "hypothesis": "It does."}
    problem(post(factories.api(stranger), "/api/v1/experiments", body), 403, "role-refused")
    made = post(client, "/api/v1/experiments", body)
    assert made.status_code == 201, made.content
    path = made["Location"]
    assert mate.get(path).json() == made.json()
    problem(post(client, "/api/v1/experiments", body), 409, "name-taken")
    problem(post(client, "/api/v1/experiments", {"name": ""}), 422, "invalid")
    problem(patch(mate, path, {"notes": "mine"}), 403, "forbidden")
    problem(factories.api(stranger).get(path), 404, "not-found")
    assert patch(client, path, {"pinned": ["loss"], "notes": "# So far"}).json()["pinned"] == [
        "loss"
    ]
    assert client.get("/api/v1/experiments?q=warm").json()["items"][0]["notes"] == "# So far"
    assert Experiment.objects.count() == 1


@pytest.mark.django_db
def test_tokens_have_at_most_their_creators_scopes(owner: User, teammate: User) -> None:
    client = factories.api(owner, scopes=["read", "ingest", "tokens"])
    before = ApiToken.objects.count()
    problem(post(client, "/api/v1/tokens", {"name": "x", "scopes": ["runs"]}), 403, "scope-missing")
    problem(post(client, "/api/v1/tokens", {"name": "x", "scopes": ["everything"]}), 422, "invalid")
    problem(post(client, "/api/v1/tokens", {"name": ""}), 422, "invalid")
    problem(
        post(client, "/api/v1/tokens", {"name": "x", "expires": "2001-01-01T00:00:00"}),
        422,
        "invalid",
    )
    assert ApiToken.objects.count() == before
    made = post(client, "/api/v1/tokens", {"name": "x", "expires": "2999-01-01T00:00:00Z"})
    assert made.status_code == 201, made.content
    token = made.json()
    assert (
        sorted(token["scopes"]) == ["ingest", "read", "tokens"]
        and token["expires"] == "2999-01-01T00:00:00Z"
    )
    new = Client(headers={"Authorization": f"Bearer {token['token']}"})
    me = new.get("/api/v1/me").json()
    assert (me["username"], me["role"], me["scopes"], me["teams"], me["token"]) == (
        "owner",
        "submitter",
        ["ingest", "read", "tokens"],
        ["lab"],
        "x",
    )
    listed = client.get("/api/v1/tokens").json()["items"]
    assert (
        listed[0]["name"] == "x" and "token" not in listed[0] and token["token"] not in str(listed)
    )
    problem(factories.api(teammate).delete(f"/api/v1/tokens/{token['id']}"), 404, "not-found")
    assert new.get("/api/v1/me").status_code == 200
    assert client.delete(f"/api/v1/tokens/{token['id']}").status_code == 204
    problem(new.get("/api/v1/me"), 401, "token-revoked")


@pytest.mark.django_db
def test_the_audit_log_is_for_administrators(owner: User, admin: User) -> None:
    run = factories.run(owner)
    problem(factories.api(owner).get("/api/v1/audit"), 403, "role-refused")
    for query in ("until=9999-12-31", "since=0001-01-01", "until=soon"):
        assert factories.api(admin).get(f"/api/v1/audit?{query}").status_code == 422
    client = factories.api(admin)
    [entry] = client.get(f"/api/v1/audit?action=run.submit&target=run:{run.pk}").json()["items"]
    assert (entry["actor"], entry["action"], entry["target"]) == (
        "owner",
        "run.submit",
        f"run:{run.pk}",
    )
    pages: list[Any] = []
    cursor = ""
    while cursor is not None:
        page = client.get(f"/api/v1/audit?limit=3&cursor={cursor}").json()
        pages, cursor = pages + page["items"], page["next_cursor"]
    ids = [int(entry["id"]) for entry in pages]
    assert ids == sorted(set(ids), reverse=True) and len(ids) > 3


@pytest.mark.django_db
def test_presets_list_what_a_spec_may_name(owner: User) -> None:
    answer = factories.api(owner).get("/api/v1/presets").json()
    assert [model["name"] for model in answer["models"]] == list(PRESETS)
    assert {"h100-80g", "cpu"} <= {device["name"] for device in answer["devices"]}
    assert answer["data"] == ["shakespeare"]
    sizes = {model["name"]: model["parameters"] for model in answer["models"]}
    assert 6.7e9 < sizes["llama2-7b"] < 6.8e9


@pytest.mark.django_db
def test_events_of_all_runs_read_no_specs(owner: User) -> None:
    runs = [factories.run(owner) for _ in range(3)]
    with CaptureQueriesContext(connection) as queries:
        events = factories.api(owner).get("/api/v1/events").json()["items"]
    assert {event["run"] for event in events} == {str(run.pk) for run in runs}
    rows = [query["sql"] for query in queries if 'FROM "runs_runevent"' in query["sql"]]
    assert len(rows) == 1 and '"runs_run"."spec"' not in rows[0]
    assert not any('FROM "runs_run" ' in query["sql"] for query in queries), "no query per event"
