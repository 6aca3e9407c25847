"""Runs by REST: submit, list, get, edit, act; each refusal next to its success."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.runs import services
from orchestrator.runs.models import Run, RunEvent
from tests import factories
from tests.orchestrator.api.test_middleware import problem

RUNS = "/api/v1/runs"


def post(client: Client, path: str, body: Any = None, **headers: str) -> Any:
    return client.post(
        path,
        json.dumps({} if body is None else body),
        content_type="application/json",
        headers=headers,
    )


def patch(client: Client, path: str, body: Any, **headers: str) -> Any:
    return client.patch(path, json.dumps(body), content_type="application/json", headers=headers)


@pytest.mark.django_db
def test_a_minimal_submission_is_a_run(owner: User) -> None:
    client = factories.api(owner)
    made = post(
        client,
        RUNS,
        {"name": "first", "spec": {"kind": "train", "train": {"steps": 200, "seq_len": 128}}},
    )
    assert made.status_code == 201, made.content
    run = made.json()
    assert made["Location"] == f"{RUNS}/{run['id']}"
    assert set(run) >= {
        "id",
        "name",
        "kind",
        "state",
        "spec",
        "plan",
        "attempt",
        "owner",
        "experiment",
        "created",
        "started",
        "ended",
        "prediction",
        "exit",
    }
    assert isinstance(run["id"], str) and run["created"].endswith("Z")
    result = {
        name: run[name]
        for name in ("name", "kind", "state", "attempt", "owner", "experiment", "started", "exit")
    }
    assert result == {
        "name": "first",
        "kind": "train",
        "state": "queued",
        "attempt": 0,
        "owner": "owner",
        "experiment": None,
        "started": None,
        "exit": None,
    }
    assert run["plan"]["dp"] == 1
    assert client.get(made["Location"]).json() == run
    assert client.get(RUNS).json() == {"items": [run], "next_cursor": None}


@pytest.mark.django_db
def test_optional_fields(owner: User) -> None:
    client = factories.api(owner)
    made = post(
        client, RUNS, {"spec": factories.spec(model="llama-15m"), "experiment": "Does it learn?"}
    ).json()
    assert (made["name"], made["experiment"]) == ("train llama-15m", "Does it learn?")
    [experiment] = client.get("/api/v1/experiments").json()["items"]
    again = post(
        client, RUNS, {"spec": factories.spec(), "experiment": int(experiment["id"]), "name": "two"}
    ).json()
    assert again["experiment"] == "Does it learn?"
    problem(post(client, RUNS, {"spec": factories.spec(), "experiment": 999}), 404, "not-found")
    outside = post(
        client, RUNS, {"spec": {"kind": "external", "model": "llama3-8b", "tags": ["titan"]}}
    ).json()
    assert (outside["state"], outside["attempt"], outside["plan"], outside["tags"]) == (
        "running",
        1,
        None,
        ["titan"],
    )


_GOOD = factories.spec(devices=2)
_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"kind": None}, "kind"),
    "kind": ({"kind": "trian"}, "kind"),
    "unknown field": ({"trian": {}}, "trian"),
    "field in a body": ({"train": {"steps": 20, "seq_len": 64, "stpes": 3}}, "train.stpes"),
    "missing field": ({"train": {"steps": 20}}, "train.seq_len"),
    "number": ({"train": {"steps": "many", "seq_len": 64}}, "train.steps"),
    "preset": ({"model": "lama-tiny"}, "model"),
    "world size": ({"resources": {"devices": 4}}, "resources.devices"),
    "batch": (
        {"plan": {"dp": 2, "micro_batch_size": 2, "global_batch_size": 7}},
        "plan.global_batch_size",
    ),
    "outside": ({"data": {"path": "/etc/passwd", "format": "text"}}, "data.path"),
    "climbing": ({"data": {"path": "../../etc/passwd", "format": "text"}}, "data.path"),
    "not there": ({"data": {"path": "nothing.txt", "format": "text"}}, "data.path"),
    "not UTF-8": ({"data": {"path": "latin1.txt", "format": "text"}}, "data.path"),
}


@pytest.mark.django_db
@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_spec_fields_are_named_and_nothing_is_created(
    owner: User, data_root: Path, wrong: str
) -> None:
    (data_root / "latin1.txt").write_bytes("Grüße aus dem Süden".encode("latin-1"))
    (data_root / "good.txt").write_text("Grüße aus dem Süden " * 100)
    client = factories.api(owner)
    changes, field = _WRONG[wrong]
    audit = AuditEntry.objects.count()
    refused = problem(
        post(client, RUNS, {"name": "it", "spec": _GOOD | changes}), 422, "spec-invalid"
    )
    [result] = [item for item in refused["errors"] if item["field"] == field]
    assert result["message"]
    assert (Run.objects.count(), RunEvent.objects.count(), AuditEntry.objects.count()) == (
        0,
        0,
        audit,
    )
    good = _GOOD | {"data": {"path": "good.txt", "format": "text"}}
    assert post(client, RUNS, {"name": "it", "spec": good}).status_code == 201


@pytest.mark.django_db
def test_wrong_request_fields_are_named(owner: User) -> None:
    client = factories.api(owner)
    for body, field in (
        ({"name": "no spec"}, "spec"),
        ({"spec": [1]}, "spec"),
        ({"spec": _GOOD, "nmae": "x"}, "nmae"),
        ({"spec": _GOOD, "name": "x" * 161}, "name"),
        ({"spec": _GOOD, "force": "perhaps"}, "force"),
        ([1], "body"),
    ):
        result = problem(post(client, RUNS, body), 422, "invalid")
        assert field in [item["field"] for item in result["errors"]], result
    assert not Run.objects.exists()


@pytest.mark.django_db
def test_strangers_runs_are_404_and_teammates_runs_read_only(
    owner: User, teammate: User, stranger: User, operator: User
) -> None:
    run = factories.run(owner)
    path = f"{RUNS}/{run.pk}"
    away = factories.api(stranger)
    assert away.get(RUNS).json()["items"] == []
    reading = [
        "",
        "/attempts",
        "/events",
        "/checkpoints",
        "/artifacts",
        "/logs",
        "/series?name=loss",
        "/series",
    ]
    for part in reading:
        problem(away.get(path + part), 404, "not-found")
    mate = factories.api(teammate)
    for part in reading:
        assert mate.get(path + part).status_code == 200, part
    problem(post(mate, f"{path}/cancel"), 403, "forbidden")
    problem(patch(mate, path, {"priority": 9}), 403, "forbidden")
    run.refresh_from_db()
    assert (run.state, run.priority) == ("queued", 0)
    assert post(factories.api(operator), f"{path}/cancel").json()["state"] == "cancelled"


@pytest.mark.django_db
def test_lists_filter_and_turn_pages_without_a_gap(owner: User, teammate: User) -> None:
    runs = [factories.run(owner, name=f"run {number:02d}") for number in range(7)]
    tagged = factories.run(teammate, name="Grüße", tags=["demo"])
    outside = factories.external_run(owner)
    services.run_cancel(run=runs[3], by=owner)
    client = factories.api(owner)

    def names(query: str) -> list[str]:
        return [run["name"] for run in client.get(f"{RUNS}?{query}").json()["items"]]

    assert names("kind=external") == [outside.name]
    assert names("tag=demo") == names("owner=teammate") == names("q=Gr%C3%BC") == ["Grüße"]
    assert names("state=cancelled") == ["run 03"]
    assert len(names("state=queued,cancelled&owner=me")) == 7
    assert names("experiment=nothing") == []
    seen, cursor = [], ""
    while True:
        page = client.get(f"{RUNS}?limit=4&cursor={cursor}").json()
        assert len(page["items"]) <= 4
        seen += [int(run["id"]) for run in page["items"]]
        if not cursor:
            factories.run(owner, name="a newcomer shifts nothing")
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == [outside.pk, tagged.pk, *(run.pk for run in reversed(runs))]
    events = client.get("/api/v1/events?limit=1").json()["next_cursor"]
    problem(client.get(f"{RUNS}?cursor={events}"), 422, "invalid")


@pytest.mark.django_db
def test_a_repeated_submission_is_one_run(owner: User, teammate: User) -> None:
    client = factories.api(owner)
    body = {"name": "once", "spec": factories.spec()}
    key = {"Idempotency-Key": "7f3c"}
    first = post(client, RUNS, body, **key)
    again = post(client, RUNS, body, **key)
    assert again.status_code == first.status_code == 201
    assert again.json() == first.json() and again["Location"] == first["Location"]
    assert again["Idempotent-Replayed"] == "true" and "Idempotent-Replayed" not in first
    problem(post(client, RUNS, body | {"name": "twice"}, **key), 422, "idempotency-key-reused")
    assert Run.objects.count() == 1
    # the key is the caller's own, and a refused request leaves it free
    assert post(factories.api(teammate), RUNS, body, **key).json()["id"] != first.json()["id"]
    problem(
        post(client, RUNS, {"spec": {"kind": "train"}}, **{"Idempotency-Key": "8"}),
        422,
        "spec-invalid",
    )
    assert post(client, RUNS, body, **{"Idempotency-Key": "8"}).status_code == 201
    assert Run.objects.count() == 3
    copied = [
        post(client, f"{RUNS}/{first.json()['id']}/clone", **{"Idempotency-Key": "9"}).json()
        for _ in range(2)
    ]
    assert copied[0] == copied[1] and Run.objects.count() == 4


@pytest.mark.django_db
def test_edits_that_cross_are_refused(owner: User) -> None:
    run = factories.run(owner)
    client, path = factories.api(owner), f"{RUNS}/{run.pk}"
    read = client.get(path)
    assert client.get(path, headers={"If-None-Match": read["ETag"]}).status_code == 304
    changed = patch(
        client,
        path,
        {"priority": 5, "tags": ["a", "b"], "notes": "why"},
        **{"If-Match": read["ETag"]},
    )
    assert changed.status_code == 200, changed.content
    assert {name: changed.json()[name] for name in ("priority", "tags", "notes")} == {
        "priority": 5,
        "tags": ["a", "b"],
        "notes": "why",
    }
    assert changed["ETag"] != read["ETag"]
    problem(
        patch(client, path, {"notes": "lost"}, **{"If-Match": read["ETag"]}),
        412,
        "edited-meanwhile",
    )
    problem(patch(client, path, {"notes": "lost"}, **{"If-Match": "nonsense"}), 422, "invalid")
    problem(patch(client, path, {"state": "finished"}), 422, "invalid")
    problem(patch(client, path, {"priority": 10**7}), 422, "invalid")
    assert client.get(path).json()["notes"] == "why"
    assert client.get(path, headers={"If-None-Match": read["ETag"]}).status_code == 200
    assert (
        patch(client, path, {"notes": "mine"}, **{"If-Match": f"W/{changed['ETag']}"}).json()[
            "notes"
        ]
        == "mine"
    )
    assert patch(client, path, {"notes": "without"}).json()["tags"] == ["a", "b"]


@pytest.mark.django_db
def test_actions_move_the_run_or_explain_the_refusal(owner: User) -> None:
    run = factories.run(owner)
    client, path = factories.api(owner), f"{RUNS}/{run.pk}"
    assert post(client, f"{path}/pause").json()["state"] == "paused"
    assert post(client, f"{path}/resume").json()["state"] == "queued"
    problem(post(client, f"{path}/resume"), 409, "not-paused")
    requests = {"checkpoint": "checkpoint", "profile": "profile", "memory-snapshot": "memory"}
    for action, requested in requests.items():
        problem(post(client, f"{path}/{action}"), 409, f"no-{requested}-now")
    attempt = factories.running(run, factories.node())
    for action in requests:
        assert post(client, f"{path}/{action}").json()["state"] == "running"
        assert services.attempt_request_sent(attempt=attempt)
    assert post(client, f"{path}/cancel").json()["state"] == "stopping"
    assert post(client, f"{path}/cancel").json()["state"] == "stopping"
    services.attempt_exited(
        attempt=run.attempts.get(),
        exit_class="cancelled",
        exit={"class": "cancelled", "reason": "asked"},
    )
    ended = client.get(path).json()
    assert ended["state"] == "cancelled" and ended["exit"]["class"] == "cancelled"
    assert post(client, f"{path}/retry").json()["state"] == "queued"
    copy = post(client, f"{path}/clone", {"spec": {"train": {"steps": 40}}})
    assert copy.status_code == 201 and copy.json()["spec"]["train"] == {"steps": 40, "seq_len": 64}
    problem(post(client, f"{path}/fork", {"step": 10}), 422, "invalid")
    services.checkpoint_record(run=run, attempt=1, step=10, path="runs/x", bytes=5)
    fork = post(client, f"{path}/fork", {"step": 10, "spec": {"train": {"steps": 60}}})
    assert fork.status_code == 201 and fork.json()["forked_from"] == str(run.pk)
    assert fork["Location"] == f"{RUNS}/{fork.json()['id']}"
    problem(post(client, f"{path}/fork", {}), 422, "invalid")
    refused = problem(post(client, f"{path}/retry", {"step": 10}), 409, "run-under-way")
    assert "pause or cancel it first" in refused["detail"]
    post(client, f"{path}/pause")
    stored = problem(post(client, f"{path}/retry", {"step": 11}), 422, "invalid")
    assert "there are 10" in stored["detail"]
    assert post(client, f"{path}/retry", {"step": 10}).json()["state"] == "queued"


@pytest.mark.django_db
def test_history_lists_attempts_events_and_files(owner: User, settings: Any) -> None:
    run = factories.run(owner)
    factories.running(run, factories.node())
    services.checkpoint_record(
        run=run, attempt=1, step=10, path="runs/x/checkpoints/step-10", bytes=5
    )
    file = settings.ENV.media_runs / str(run.pk) / "answers.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)  # runs of other tests have the same number
    file.write_bytes(b"[1]\n" * 100_000)
    services.artifact_record(
        run=run, name="answers.jsonl", path=f"runs/{run.pk}/answers.jsonl", bytes=400_000
    )
    services.artifact_record(run=run, name="elsewhere", path="../../etc/passwd", bytes=1)
    client, path = factories.api(owner), f"{RUNS}/{run.pk}"
    [attempt] = client.get(f"{path}/attempts").json()["items"]
    assert (attempt["attempt"], attempt["state"]) == (1, "running")
    events = client.get(f"{path}/events").json()["items"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    first = client.get(f"{path}/events?limit=2").json()
    rest = client.get(f"{path}/events?cursor={first['next_cursor']}").json()
    assert first["items"] + rest["items"] == events
    moves = client.get(f"{path}/events?type=state_changed").json()["items"]
    assert {event["type"] for event in moves} == {"state_changed"} and moves[-1]["data"][
        "new"
    ] == "running"
    newest = client.get(f"/api/v1/events?run={run.pk}&limit=200").json()["items"]
    assert sorted(newest, key=lambda event: event["seq"]) == events
    [checkpoint] = client.get(f"{path}/checkpoints").json()["items"]
    assert (checkpoint["step"], checkpoint["bytes"]) == (10, 5)
    one, other = client.get(f"{path}/artifacts").json()["items"]
    download = client.get(f"{path}/artifacts/{one['id']}/download")
    assert download.getvalue() == file.read_bytes()
    assert 'filename="answers.jsonl"' in download["Content-Disposition"]
    problem(client.get(f"{path}/artifacts/{other['id']}/download"), 409, "file-elsewhere")
    problem(client.get(f"{path}/artifacts/12345/download"), 404, "not-found")


@pytest.mark.django_db
def test_a_call_costs_a_dozen_queries_at_most(
    owner: User, django_assert_max_num_queries: Any
) -> None:
    run, client = factories.run(owner, tags=["a"]), factories.api(owner)
    for number in range(20):
        factories.run(owner, name=f"many {number}", tags=["x", "y"])
    paths = [
        RUNS,
        f"{RUNS}/{run.pk}",
        f"{RUNS}?tag=x&q=many&state=queued&owner=me",
        f"{RUNS}/{run.pk}/series?name=loss",
    ]
    paths += [
        f"/api/v1/{noun}"
        for noun in ("events", "queue", "nodes", "devices", "experiments", "tokens", "me")
    ]
    for name in ("a", "b", "c"):
        factories.node(name)
    for path in paths:
        with django_assert_max_num_queries(12):
            assert client.get(path).status_code == 200, path


@pytest.mark.django_db
def test_a_plan_that_does_not_fit_requires_force(owner: User) -> None:
    factories.node("n1", devices=2)
    client = factories.api(owner)
    body = {"spec": {"kind": "train", "model": "llama3-8b", "train": {"steps": 1, "seq_len": 128}}}
    result = problem(post(client, RUNS, body), 422, "plan-does-not-fit")
    assert "GiB" in result["detail"] and "force" in result["detail"] and result["errors"][0]["hint"]
    forced = post(client, RUNS, {**body, "force": True})
    assert forced.status_code == 201 and forced.json()["prediction"]["fits"] is False
