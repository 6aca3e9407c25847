"""/health/ and /metrics, without a login."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import OperationalError
from django.test import Client

from orchestrator.accounts.models import User
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
        "queue": {"waiting": 1},
    } | changes


@pytest.mark.django_db
def test_health_names_dead_components(client: Client) -> None:
    answer = client.get("/health/", headers={"Accept": "application/json"})
    body = answer.json()
    assert answer.status_code == 503 and body["ok"] is False
    assert any("scheduler" in trouble for trouble in body["troubles"])
    assert set(body) >= {"scheduler", "redis", "ingest", "nodes"}
    assert client.post("/health/").status_code == 405


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


@pytest.mark.django_db
def test_metrics_are_openmetrics(
    client: Client, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "health", facts)
    factories.run(owner)
    factories.running(factories.run(owner), factories.node(devices=3))
    answer = client.get("/metrics")
    assert answer["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    *lines, last, nothing = answer.content.decode().split("\n")
    assert (last, nothing) == ("# EOF", "")
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[a-z]+"\})? -?\d+\.\d+')
    assert all(
        line.startswith(("# TYPE ", "# UNIT ", "# HELP ")) or sample.fullmatch(line)
        for line in lines
    ), lines
    for line in (
        "orrery_healthy 1.0",
        "orrery_scheduler_age_seconds 1.2",
        "orrery_ingest_lag_seconds 0.25",
        'orrery_nodes{health="up"} 1.0',
        'orrery_runs{state="queued"} 1.0',
        'orrery_runs{state="running"} 1.0',
        'orrery_devices{use="idle"} 3.0',
    ):
        assert line in lines
