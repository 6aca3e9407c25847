"""The dashboard and the alerts ask for metrics and labels that /metrics has."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from django.test import Client

from tests.deploy.test_deploy import DEPLOY, ROOT
from tests.orchestrator.scheduling.conftest import broker  # noqa: F401  (fixture)

DASHBOARD = json.loads((DEPLOY / "grafana" / "orrery.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "grafana" / "alerts.yaml").read_text())["groups"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
RULES = [rule for group in ALERTS for rule in group["rules"]]


@pytest.fixture
def families(client: Client, db: None, broker: Any) -> dict[str, set[str]]:  # noqa: F811
    """Labels of every metric that a query may name; empty for those without samples."""
    text = client.get("/metrics").content.decode()
    names: dict[str, set[str]] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        full = f"{name}_total" if kind == "counter" else name
        samples = re.findall(rf"^{full}{{([^}}]*)}}", text, re.MULTILINE)
        names[full] = {label for one in samples for label in re.findall(r"(\w+)=", one)}
    return names


def test_every_query_names_metrics_and_labels_that_exist(families: dict[str, set[str]]) -> None:
    for query in [*QUERIES, *(rule["expr"] for rule in RULES)]:
        named = set(re.findall(r"orrery_\w+", query))
        assert named and named <= set(families), query
        labels = {
            label.strip()
            for listed in re.findall(r"by \(([^)]*)\)", query)
            for label in listed.split(",")
        } | set(re.findall(r"[{,](\w+)[=!]", query))
        known = set().union(*(families[name] for name in named))
        assert not known or labels <= known, query


def test_the_dashboard_shows_every_metric(families: dict[str, set[str]]) -> None:
    shown = {name for query in QUERIES for name in re.findall(r"orrery_\w+", query)}
    assert set(families) == shown


def test_panels_do_not_overlap_and_have_titles_and_units() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells: set[Any] = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_names_a_document_that_exists() -> None:
    for rule in RULES:
        assert (ROOT / rule["annotations"]["runbook"]).exists(), rule["alert"]
