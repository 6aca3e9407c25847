"""Simulations by REST and page: run by the job, bounded, private to their owner."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.background_jobs.models import Simulation
from orchestrator.background_jobs.simulations import requests
from tests import factories

pytestmark = pytest.mark.django_db

CSV = (
    "submit_s,user,team,devices,duration_s,priority\n"
    "0,ann,vision,8,100,0\n1,ann,vision,8,50,0\n2,bob,speech,8,10,0\n"
)
BODY: dict[str, Any] = {"trace": "philly:60:1", "nodes": 2, "devices_per_node": 8}


def post(user: User, **change: Any) -> Any:
    body = {**BODY, **change}
    return factories.api(user).post("/api/v1/simulations", body, content_type="application/json")


def run_job() -> dict[str, int]:
    return requests.run_simulations(dry_run=False, renew=lambda: None)


def page_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def test_a_simulation_by_rest(owner: User) -> None:
    answer = post(owner)
    assert answer.status_code == 201
    assert (answer.json()["state"], answer.json()["runs"]) == ("queued", 60)
    assert run_job() == {"simulated": 1}
    client = factories.api(owner)
    done = client.get(f"/api/v1/simulations/{answer.json()['id']}").json()
    assert done["state"] == "done"
    assert done["policies"]["orrery"]["utilization"] > 0
    assert client.get("/api/v1/simulations").json()["items"] == [done]
    assert client.delete(f"/api/v1/simulations/{done['id']}").status_code == 204
    assert run_job() == {"simulated": 0}


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"trace": "philly:60000:1"}, "trace", "from 1 to 50,000"),
        ({"trace": "mine"}, "trace", "unknown trace"),
        ({"trace": "mine.csv", "csv": CSV + "3,a,b,1,-1,0\n"}, "trace", "line 5: duration_s is -1"),
        ({"policies": ["best"]}, "policies", "unknown policy"),
        ({"nodes": 100_000}, "nodes", "at most 200,000"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    owner: User, change: dict[str, Any], field: str, text: str
) -> None:
    answer = post(owner, **change)
    assert answer.status_code == 422
    assert text in answer.content.decode() and f'"{field}"' in answer.content.decode()
    assert not Simulation.objects.exists()


def test_the_number_of_a_users_simulations_is_bounded(owner: User) -> None:
    for _ in range(requests.MOST):
        assert post(owner, trace="philly:1:1").status_code == 201
    assert post(owner).status_code == 409


def test_a_simulation_that_takes_too_long_fails_with_a_hint(
    owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LONGEST_S", -1.0)
    post(owner, trace="philly:3000:1", nodes=1, policies=["orrery"])
    run_job()
    row = Simulation.objects.get()
    assert row.state == "failed" and "fewer runs" in row.error


def test_the_page_simulates_an_uploaded_file(owner: User) -> None:
    client = page_of(owner)
    assert "No simulations yet" in client.get("/simulator/").content.decode()
    form = {"kind": "csv", "nodes": "1", "per_node": "8", "policies": ["fifo", "orrery"]}
    sent = client.post("/simulator/", {**form, "file": SimpleUploadedFile("t.csv", CSV.encode())})
    row = Simulation.objects.get()
    assert (sent.status_code, sent.headers["Location"]) == (302, f"/simulator/{row.pk}/")
    assert "every 2s" in client.get(f"/simulator/{row.pk}/").content.decode()
    run_job()
    text = client.get(f"/simulator/{row.pk}/").content.decode()
    assert "With orrery, runs wait" in text and text.count("<polyline") == 4
    assert "t.csv" in client.get("/simulator/").content.decode()
    client.post(f"/simulator/{row.pk}/delete/")
    assert not Simulation.objects.exists()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"kind": "csv"}, "hoose a CSV file"),
        ({"kind": "philly", "runs": "many", "seed": "1"}, "is not a number"),
        ({"kind": "philly", "runs": "10", "seed": "1", "policies": []}, "no policy"),
    ],
)
def test_the_page_refuses_a_wrong_form(owner: User, form: dict[str, Any], text: str) -> None:
    sent = page_of(owner).post("/simulator/", {"nodes": "1", "per_node": "8", **form})
    assert sent.status_code == 422 and text in sent.content.decode()
