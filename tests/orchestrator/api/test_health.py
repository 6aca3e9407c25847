"""/health/ and /metrics, without a login."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.api.http import overload
from orchestrator.scheduling import selectors
from tests import factories


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "ok": True,
        "troubles": [],
        "scheduler": {"age_s": 1.2, "holder": "h"},
        "redis": {"ok": True},
        "ingest": {"lag_s": 0.25},
        "nodes": {"up": 1, "silent": 0, "lost": 0},
        "versions": {"nodes": {"same": 1, "minor": 0, "refused": 0}},
        "queue": {"waiting": 1},
    } | changes


@pytest.mark.django_db
def test_health_names_dead_components(client: Client, stranger: User) -> None:
    client.force_login(stranger)
    answer = client.get("/health/", headers={"Accept": "application/json"})
    body = answer.json()
    assert answer.status_code == 503 and body["ok"] is False
    assert any("scheduler" in trouble for trouble in body["troubles"])
    assert set(body) >= {"scheduler", "redis", "ingest", "nodes"}
    assert client.post("/health/").status_code == 405


@pytest.mark.django_db
@pytest.mark.parametrize("ok", [True, False])
def test_strangers_learn_only_whether_it_works(
    client: Client, owner: User, monkeypatch: pytest.MonkeyPatch, ok: bool
) -> None:
    secret = "node-of-a-secret-project is silent"
    monkeypatch.setattr(
        selectors, "health", lambda: facts(ok=ok, troubles=[secret] if not ok else [])
    )
    for visitor in (client, factories.api(owner, scopes=["runs"])):
        answer = visitor.get("/health/", headers={"Accept": "application/json"})
        assert (answer.json(), answer.status_code) == ({"ok": ok}, 200 if ok else 503)
        page = visitor.get("/health/", headers={"Accept": "text/html"})
        assert secret not in page.content.decode() and "leader" not in page.content.decode()
    for reader in (factories.client_for(owner), factories.api(owner, scopes=["read"])):
        answer = reader.get("/health/", headers={"Accept": "application/json"})
        assert answer.json()["scheduler"] == {"age_s": 1.2, "holder": "h"}
        assert answer.json()["troubles"] == ([secret] if not ok else [])
        page = reader.get("/health/", headers={"Accept": "text/html"})
        assert "leader" in page.content.decode()


@pytest.mark.django_db
def test_health_is_a_page_for_browsers(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "health", facts)
    page = client.get("/health/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.status_code == 200 and page["Content-Type"].startswith("text/html")
    for accept in ("*/*", "application/json"):
        assert client.get("/health/", headers={"Accept": accept}).json()["ok"] is True

    def away() -> None:
        raise OperationalError("unable to open database file")

    monkeypatch.setattr(selectors, "health", away)
    answer = client.get("/health/")
    assert answer.status_code == 503 and "database" in answer.json()["troubles"][0]


def test_refused_requests_are_counted_for_all_web_processes(live_redis: str) -> None:
    before = overload.refused_total()
    assert before is not None
    overload.add_refused(2)
    overload.add_refused(3)
    assert overload.refused_total() == before + 5


def test_refused_requests_are_unknown_without_redis(settings: Any) -> None:
    settings.REDIS_URL = "unix:///nowhere/valkey.sock"
    overload.add_refused(2)
    assert overload.refused_total() is None


@pytest.mark.django_db
def test_metrics_are_openmetrics(
    client: Client, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "health", facts)
    monkeypatch.setattr(overload, "refused_total", lambda: 3)
    factories.run(owner)
    factories.running(factories.run(owner), factories.node(devices=3))
    answer = client.get("/metrics")
    assert answer["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    *lines, last, nothing = answer.content.decode().split("\n")
    assert (last, nothing) == ("# EOF", "")
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[a-z0-9.-]+"(,[a-z]+="[a-z0-9.-]+")*\})? -?\d+\.\d+')
    comments = ("# TYPE ", "# UNIT ", "# HELP ")
    unknown = [x for x in lines if not x.startswith(comments) and not sample.fullmatch(x)]
    assert not unknown
    for line in (
        "orrery_healthy 1.0",
        "orrery_refused_requests_total 3.0",
        "orrery_scheduler_age_seconds 1.2",
        "orrery_ingest_lag_seconds 0.25",
        'orrery_nodes{health="up"} 1.0',
        'orrery_runs{state="queued"} 1.0',
        'orrery_runs{state="running"} 1.0',
        'orrery_devices{use="idle"} 3.0',
    ):
        assert line in lines


@pytest.mark.django_db
def test_every_metric_is_documented(client: Client) -> None:
    text = client.get("/metrics").content.decode()
    kinds = dict(re.findall(r"^# TYPE (orrery_\w+) (\w+)$", text, re.MULTILINE))
    emitted = {
        f"{name}_total" if kinds[name] == "counter" else name: meaning  # as samples are named
        for name, meaning in re.findall(r"^# HELP (orrery_\w+) (.+)$", text, re.MULTILINE)
    }
    assert {*re.findall(r"^(orrery_\w+)[{ ]", text, re.MULTILINE)} <= emitted.keys()
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(orrery_\w+)` \|[^|]*\| (.+) \|$", page, re.MULTILINE))
    assert documented == emitted
