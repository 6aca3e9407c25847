"""Ingest for external runs: points, events, log lines, finish."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs import services
from orchestrator.runs.models import Run, RunEvent
from tests import factories
from tests.orchestrator.api.test_middleware import problem


def send(client: Client, path: str, body: Any, *, packed: bool = False) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    if packed:
        return client.post(
            path, gzip.compress(raw), "application/json", headers={"Content-Encoding": "gzip"}
        )
    return client.post(path, raw, content_type="application/json")


def point(seq: int, **more: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "step": seq,
        "tokens": 64 * seq,
        "time": 1790000000.0 + seq,
        "values": {"loss": 5 / seq},
    } | more


@pytest.fixture
def run(owner: User) -> Run:
    return factories.external_run(owner)


@pytest.mark.django_db
@pytest.mark.parametrize("packed", [False, True])
def test_points_come_in_once(owner: User, run: Run, packed: bool) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}"
    points = [point(seq, rank=rank) for rank in (0, 1) for seq in range(1, 101)]
    first = send(client, f"{path}/points", {"points": points}, packed=packed)
    assert first.json() == {"accepted": 200, "duplicates": 0, "rejected": []}, first.content
    again = send(client, f"{path}/points", [*points, point(101)], packed=packed).json()
    assert again == {"accepted": 1, "duplicates": 200, "rejected": []}
    series = client.get(f"{path}/series?name=loss").json()
    assert series["x"] == list(range(1, 102)) and series["y"][0] == 5
    assert client.get(path).json()["summary"]["step"] == 101


@pytest.mark.django_db
def test_invalid_points_are_reported_and_valid_ones_stored(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}"
    bad = {
        1: point(2, step="two"),
        2: {"step": 1},
        3: point(3, run="another"),
        4: point(4, attempt=7),
        5: point(2**70),
        6: point(5, colour="red"),
        7: point(-1),
        8: point(6, values={"loss": "low"}),
        9: point(7, rank=-2),
    }
    odd = [point(8, values={"loss": float("nan"), "lr": "Infinity"}), {"seq": 9, "values": {}}]
    items = [point(1), *bad.values(), *odd]
    answer = send(client, f"{path}/points", {"points": items}).json()
    assert answer["accepted"] == 3, answer
    assert {item["index"] for item in answer["rejected"]} == set(bad)
    assert all(len(item["message"].split()) >= 3 for item in answer["rejected"])
    assert client.get(f"{path}/series?name=loss").json()["y"] == [5, "NaN"]
    result = problem(
        send(client, f"{path}/points", {"points": [point(1)] * 10_001}), 422, "invalid"
    )
    assert result["errors"][0]["field"] == "points"
    problem(send(client, f"{path}/points", {"points": [3]}), 422, "invalid")
    problem(send(client, f"{path}/points", {"pionts": []}), 422, "invalid")
    assert send(client, f"{path}/points", []).json()["accepted"] == 0


@pytest.mark.django_db
def test_compressed_bodies_are_limited(owner: User, run: Run, settings: Any) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}/points"
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 20_000
    bomb = gzip.compress(json.dumps({"points": [point(1, note=" " * 200_000)]}).encode())
    assert len(bomb) < 20_000
    headers = {"Content-Encoding": "gzip"}
    problem(client.post(path, bomb, "application/json", headers=headers), 413, "body-too-large")
    problem(
        client.post(path, b"not gzip", "application/json", headers=headers), 400, "malformed-body"
    )
    problem(
        client.post(path, gzip.compress(b"[]")[:-6], "application/json", headers=headers),
        400,
        "malformed-body",
    )
    problem(
        client.post(path, b"[]", "application/json", headers={"Content-Encoding": "br"}),
        415,
        "encoding-unknown",
    )
    members = gzip.compress(b'{"points":') + gzip.compress(json.dumps([point(1)]).encode() + b"}")
    assert client.post(path, members, "application/json", headers=headers).json()["accepted"] == 1


@pytest.mark.django_db
def test_events_and_lines_come_in_once(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}"
    events = [
        {
            "seq": 1,
            "rank": 0,
            "type": "checkpoint_saved",
            "data": {"step": 10, "note": "a\u0000b \ud83d\ude00 \udcff"},
        },
        {"seq": 2, "type": "evaluated", "data": {"score": float("inf")}, "time": 1790000000.5},
        {"seq": 3, "type": "state_changed", "data": {"new": "finished"}},
        {"seq": 4, "data": {}},
    ]
    answer = send(client, f"{path}/events", {"events": events}).json()
    assert (answer["accepted"], [item["index"] for item in answer["rejected"]]) == (2, [2, 3])
    assert send(client, f"{path}/events", {"events": events}).json()["duplicates"] == 2
    result = client.get(f"{path}/events?type=checkpoint_saved,evaluated").json()["items"]
    assert result[0]["data"] == {"step": 10, "note": "a\ufffdb \U0001f600 \ufffd"}
    assert result[1]["data"] == {"score": "Infinity"}
    assert result[1]["time"] == 1790000000.5 and result[0]["attempt"] == 1

    lines = [{"seq": seq, "rank": 0, "text": f"step {seq}"} for seq in (1, 2, 3, 5)]
    assert send(client, f"{path}/logs", {"lines": lines}).json() == {
        "accepted": 4,
        "duplicates": 0,
        "rejected": [],
    }
    assert send(client, f"{path}/logs", {"logs": lines}).json()["duplicates"] == 4
    more = [
        {"seq": 4, "text": "late"},
        {"seq": 6, "text": "Error: grüße"},
        {"seq": 1, "rank": 1, "text": "other"},
    ]
    assert send(client, f"{path}/logs", lines + more).json() == {
        "accepted": 3,
        "duplicates": 4,
        "rejected": [],
    }
    page = client.get(f"{path}/logs?limit=2").json()
    rest = client.get(f"{path}/logs?cursor={page['next_cursor']}").json()
    texts = [line["text"] for line in page["items"] + rest["items"]]
    assert sorted(texts) == sorted(
        ["step 1", "step 2", "step 3", "step 5", "late", "Error: grüße", "other"]
    )
    assert rest["next_cursor"] is None
    assert [line["text"] for line in client.get(f"{path}/logs?rank=1").json()["items"]] == ["other"]
    assert [line["seq"] for line in client.get(f"{path}/logs?q=ERROR&rank=0").json()["items"]] == [
        6
    ]
    assert [line["seq"] for line in client.get(f"{path}/logs?rank=0&after=4").json()["items"]] == [
        5,
        6,
    ]
    after = rest["items"][-1]["cursor"]
    assert client.get(f"{path}/logs?after={after}").json()["items"] == []
    problem(client.get(f"{path}/logs?after=nonsense"), 422, "invalid")


@pytest.mark.django_db
def test_a_run_is_finished_by_its_own_program(owner: User, run: Run) -> None:
    client, path = factories.api(owner), f"/api/v1/runs/{run.pk}"
    ended = send(client, f"{path}/finish", {"status": "failed", "reason": "loss went up"}).json()
    assert (
        ended["state"] == "failed" and ended["exit"]["reason"] == "loss went up" and ended["ended"]
    )
    assert send(client, f"{path}/finish", {"state": "failed"}).status_code == 200
    problem(send(client, f"{path}/finish", {"status": "finished"}), 409, "run-ended")
    problem(send(client, f"{path}/finish", {"status": "exploded"}), 422, "invalid")
    # points that arrive after the end still count
    assert send(client, f"{path}/points", [point(1)]).json()["accepted"] == 1
    other = factories.external_run(owner)
    services.run_cancel(run=other, by=owner)
    problem(send(client, f"/api/v1/runs/{other.pk}/points", [point(1)]), 409, "run-cancelled")


@pytest.mark.django_db
def test_only_own_external_runs_accept_points(
    owner: User, teammate: User, stranger: User, run: Run
) -> None:
    event, line = {"seq": 1, "type": "x"}, {"seq": 1, "text": "x"}
    bodies: dict[str, Any] = {"points": [point(1)], "events": [event], "logs": [line], "finish": {}}
    ours = factories.run(owner)
    before = RunEvent.objects.count()
    for part, body in bodies.items():
        path = f"/api/v1/runs/{run.pk}/{part}"
        problem(send(factories.api(teammate), path, body), 403, "not-yours")
        problem(
            send(factories.api(owner), f"/api/v1/runs/{ours.pk}/{part}", body), 409, "not-external"
        )
        problem(
            send(factories.api(owner, scopes=["read", "runs"]), path, body), 403, "scope-missing"
        )
        problem(send(factories.api(stranger), path, body), 403, "role-refused")
    assert RunEvent.objects.count() == before
    client = factories.api(owner, scopes=["ingest", "read"])
    for part, body in bodies.items():
        assert send(client, f"/api/v1/runs/{run.pk}/{part}", body).status_code == 200, part
