"""Planner resources: estimates, searches, calibrations, device types, saved plans."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from tests import factories
from tests.orchestrator.api.test_middleware import problem
from tests.orchestrator.api.test_runs import patch, post
from tests.orchestrator.planner.store.test_services import MEASURED
from tests.orchestrator.planner.test_request_parsing import H100, LINE

pytestmark = pytest.mark.django_db
PLANS, CALIBRATIONS = "/api/v1/plans", "/api/v1/calibrations"
SEARCH: dict[str, Any] = {
    "model": "llama2-7b",
    "cluster": {"device": "a100-80g", "devices_per_node": 8},
    "workload": {"seq_len": 2048, "global_batch_size": 64},
    "fix": {"pp": 1, "cp": 1},
    "top": 2,
}


def test_viewers_may_plan(stranger: User) -> None:
    client = factories.api(stranger)
    one = post(client, f"{PLANS}/estimate", {**LINE, "source": "a talk", "_x": 1}).json()
    assert one["id"] == "q1" and one["ok"] and one["step_time_s"] > 0 and one["calibration"] is None
    illegal = post(client, f"{PLANS}/estimate", {**LINE, "plan": {"dp": 3}})
    assert (
        illegal.status_code == 200
        and illegal.json()["ok"] is False
        and illegal.json()["problems"][0]["hint"]
    )
    many = post(
        client, f"{PLANS}/estimate", {"requests": [LINE, {"id": 2, "model": "x"}, 3]}
    ).json()["answers"]
    assert [each["ok"] for each in many] == [True, False, False] and many[0]["memory"] == one[
        "memory"
    ]
    whole = post(
        client, f"{PLANS}/estimate", {**LINE, "explain": True}, **{"Accept-Encoding": "gzip"}
    )
    assert whole["Content-Encoding"] == "gzip" and len(whole.content) < 400_000
    tree = json.loads(gzip.decompress(whole.content))["mfu"]
    assert tree["value"] == pytest.approx(one["mfu"]) and tree["inputs"]
    named = post(client, f"{PLANS}/estimate", {**LINE, "explain": "mfu", "explain_depth": 1})
    assert named.json()["explained"]["mfu"]["value"] == tree["value"] and len(named.content) < 8_000

    match = post(client, f"{PLANS}/search", SEARCH).json()
    assert match["fit"] and match["plans"][0]["plan"]["pp"] == 1 and match["pareto"]
    served = {"model": "llama2-7b", "cluster": SEARCH["cluster"], "prompt_len": 128}
    assert post(client, f"{PLANS}/serving", served).json()["tpot_s"] > 0
    line = {
        **LINE,
        "plan": match["plans"][0]["plan"],
        "engine": "megatron",
        "model": "llama2-7b",
        "cluster": SEARCH["cluster"],
        "workload": {"seq_len": 2048},
    }
    assert "--micro-batch-size" in post(client, f"{PLANS}/export", line).json()["text"]

    problem(post(client, PLANS, {"name": "x", "line": LINE}), 403, "role-refused")
    problem(
        post(client, CALIBRATIONS, {"name": "x", "measurements": MEASURED}), 403, "role-refused"
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("estimate", {**LINE, "cluster": {"device": "h100"}}, "cluster.device"),
        ("estimate", {**LINE, "model": "/etc/passwd"}, "model"),
        ("estimate", {**LINE, "colour": 1}, "colour"),
        ("estimate", {}, "model"),
        ("search", {**SEARCH, "fix": {"tq": 1}}, "fix.tq"),
        ("search", {**SEARCH, "top": 9999}, "top"),
        ("search", {**SEARCH, "top": 99, "explain": True}, "top"),
        ("estimate", {"requests": [LINE] * 99, "explain": True}, "explain"),
        ("search", {**SEARCH, "model": {"layers": 2}}, "model.hidden"),
        ("serving", {"model": "llama2-7b", "cluster": {"device": "x"}}, "cluster.device"),
        ("serving", {"model": "llama2-7b", "cluster": {}, "device": "x"}, "device"),
        ("estimate", {**LINE, "explain": "beauty"}, "explain"),
        ("export", {**LINE, "engine": "jax"}, "engine"),
    ],
)
def test_bad_queries_are_problems(owner: User, path: str, body: dict[str, Any], field: str) -> None:
    result = problem(post(factories.api(owner), f"{PLANS}/{path}", body), 422, "invalid")
    assert field in [item["field"] for item in result["errors"]]


def test_calibrations_are_a_resource(owner: User, teammate: User) -> None:
    client = factories.api(owner)
    key = {"Idempotency-Key": "k1"}
    body = {"name": "March", "measurements": MEASURED, "default": True}
    made = post(client, CALIBRATIONS, body, **key)
    assert made.status_code == 201 and post(client, CALIBRATIONS, body, **key).json() == made.json()
    path = made["Location"]
    one = client.get(path)
    assert one.json()["document"]["groups"][0]["rows"] == 3 and one.json()["default"]
    assert client.get(path, headers={"If-None-Match": one["ETag"]}).status_code == 304
    [listed] = client.get(CALIBRATIONS).json()["items"]
    assert listed["name"] == "March" and listed["document"] is None
    assert post(client, f"{PLANS}/estimate", LINE).json()["calibration"] == "March"
    assert (
        post(client, f"{PLANS}/estimate", {**LINE, "calibration": "none"}).json()["calibration"]
        is None
    )
    problem(post(client, f"{PLANS}/estimate", {**LINE, "calibration": 99}), 404, "not-found")

    problem(patch(factories.api(teammate), path, {"default": False}), 403, "forbidden")
    changed = patch(client, path, {"default": False})
    assert changed.json()["default"] is False
    problem(
        client.patch(
            path,
            {"default": True},
            content_type="application/json",
            headers={"If-Match": one["ETag"]},
        ),
        412,
        "edited-meanwhile",
    )
    problem(post(client, CALIBRATIONS, {"name": "x", "runs": ["first"]}), 422, "invalid")
    run = factories.run(owner)
    result = problem(post(client, CALIBRATIONS, {"name": "x", "runs": [run.pk]}), 422, "invalid")
    assert "queued" in result["detail"]
    assert client.delete(path).status_code == 204
    problem(client.get(path), 404, "not-found")


def test_own_devices_and_saved_plans(owner: User, teammate: User, stranger: User) -> None:
    client, mate, other = (factories.api(each) for each in (owner, teammate, stranger))
    made = post(client, "/api/v1/device-types", {**H100, "name": "lab-gpu"})
    assert made.status_code == 201, made.content
    assert [each["name"] for each in mate.get("/api/v1/device-types").json()["items"]] == [
        "lab-gpu"
    ]
    served = {
        "model": "llama2-7b",
        "cluster": {"device": "lab-gpu", "devices_per_node": 2},
        "prompt_len": 128,
    }
    same = {**served, "cluster": {**served["cluster"], "device": H100["name"]}}
    own, catalogue = (post(client, f"{PLANS}/serving", each).json() for each in (served, same))
    assert (
        own["memory"]["capacity_bytes"] == H100["memory_bytes"]
        and own["devices"] == catalogue["devices"]
    )
    assert own["tpot_s"] > 0
    problem(other.get(made["Location"]), 404, "not-found")
    line = {**LINE, "cluster": {"device": "lab-gpu", "devices_per_node": 8}}
    assert post(mate, f"{PLANS}/estimate", line).json()["ok"]
    problem(post(other, f"{PLANS}/estimate", line), 422, "invalid")
    problem(post(client, "/api/v1/device-types", {**H100, "name": "lab-gpu"}), 409, "name-taken")

    saved = post(client, PLANS, {"name": "the one", "line": line, "link": "/planner/?x=1"})
    assert saved.status_code == 201 and mate.get(saved["Location"]).json()["line"] == line
    assert [each["name"] for each in mate.get(PLANS).json()["items"]] == ["the one"]
    _gone(client, saved["Location"])
    _gone(client, made["Location"])


def _gone(client: Client, path: str) -> None:
    assert client.delete(path).status_code == 204
    problem(client.get(path), 404, "not-found")
