"""`orrery report` and `orrery dashboard` through the real REST API."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from django.test import Client
from orrery_cli.commands.report import first_heading, split_title

from orchestrator.accounts.models import User
from orchestrator.dashboards.models import Dashboard
from orchestrator.reports.models import Report
from tests import factories
from tests.cli.conftest import URL, Orrery


def test_a_report_is_created_updated_shown_and_shared(
    orrery: Orrery, tmp_path: Path, client: Client
) -> None:
    path = tmp_path / "report.md"
    path.write_text("# Learning rates\n\nRates above **1e-3** diverge.\n")
    made = orrery("report", "create", path)
    assert made.code == 0, made.err
    id = Report.objects.get().pk
    expected = f"report {id} Learning rates: version 1\n{URL}/reports/{id}/"
    assert made.out.strip() == expected
    assert "Learning rates" in orrery("report", "list", "-q", "rates").out
    path.write_text("# Learning rates\n\nRates above **3e-3** diverge.\n")
    update = ("report", "update", id, path, "--title", "Rates", "--note", "more runs")
    changed = json.loads(orrery(*update, "--json").out)
    assert (changed["version"], changed["title"], changed["note"]) == (2, "Rates", "more runs")
    assert "3e-3" in orrery("report", "show", id).out
    assert "1e-3" in orrery("report", "show", id, "--version", 1).out
    late = orrery("report", "update", id, path, "--version", 1)
    assert late.code == 1 and "version" in late.err
    link = json.loads(orrery("report", "share", id, "--days", 7, "--json").out)
    assert link["url"] == f"{URL}{link['path']}"
    assert "3e-3" in client.get(link["path"], HTTP_HOST="orrery.test").content.decode()


def test_a_title_that_is_the_first_heading_is_shown_once(orrery: Orrery, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    path.write_text("# Results\n\ntext\n")
    assert orrery("report", "create", path, "--title", "Results").code == 0
    assert orrery("report", "create", path, "--title", "June").code == 0
    texts = dict(Report.objects.values_list("title", "versions__text"))
    assert texts["Results"].strip() == "text" and texts["June"].startswith("# Results")


def test_reports_need_a_title_and_a_readable_file(
    orrery: Orrery, tmp_path: Path, monkeypatch: Any
) -> None:
    assert orrery("report", "list").out == (
        "No reports. `orrery report create FILE` creates one.\n"
    )
    missing = orrery("report", "create", tmp_path / "none.md")
    assert missing.code == 2 and "cannot read" in missing.err
    monkeypatch.setattr("sys.stdin", io.StringIO("no heading"))
    untitled = orrery("report", "create", "-")
    assert untitled.code == 2 and "Give the report a --title." in untitled.err
    assert orrery("report", "show", 99).code == 1
    assert not Report.objects.exists()


def test_the_first_heading_is_outside_of_fenced_blocks() -> None:
    assert first_heading("```sh\n# a comment\n```\n\n## Losses ##\n") == "Losses"
    assert first_heading("#hashtag\ntext") == ""
    assert split_title("\n# Losses\n\ntext\n") == ("Losses", "text\n")
    assert split_title("text\n\n# Losses\n") == ("Losses", "text\n\n# Losses\n")


def test_a_dashboard_is_exported_imported_and_replaced(
    orrery: Orrery, owner: User, tmp_path: Path
) -> None:
    run, path = factories.run(owner), tmp_path / "losses.json"
    panels = [{"id": "loss", "kind": "line", "metrics": ["loss"]}]
    path.write_text(json.dumps({"version": 1, "panels": panels}))
    made = orrery("dashboard", "import", path, "--name", "Losses", "--run", run.pk)
    assert made.code == 0, made.err
    first = Dashboard.objects.get()
    assert (first.name, first.run) == ("Losses", run)
    assert f"run {run.pk}" in orrery("dashboard", "list", "--run", run.pk).out
    out = tmp_path / "out.json"
    assert orrery("dashboard", "export", first.pk, "-o", out).code == 0
    assert json.loads(out.read_text()) == json.loads(orrery("dashboard", "export", first.pk).out)
    copied = json.loads(orrery("dashboard", "import", out, "--json").out)
    assert (copied["name"], copied["run"]) == ("Losses", None)
    path.write_text(json.dumps({"panels": [*panels, {**panels[0], "id": "b"}]}))
    replaced = orrery("dashboard", "import", path, "--replace", copied["id"])
    assert f"dashboard {copied['id']} Losses: 2 panels" in replaced.out
    rows = json.loads(orrery("dashboard", "list", "--json").out)["items"]
    assert [len(row["document"]["panels"]) for row in rows] == [2, 1]


def test_wrong_dashboards_are_refused_with_the_panel(orrery: Orrery, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"panels": [{"id": "a", "kind": "pie"}]}))
    refused = orrery("dashboard", "import", path)
    assert refused.code == 1 and "document.panels.0.kind" in refused.err
    path.write_text(json.dumps({"panels": []}))
    both = orrery("dashboard", "import", path, "--replace", 1, "--run", 1)
    assert both.code == 2 and "--replace and --run exclude each other" in both.err
    assert orrery("dashboard", "list").out.startswith("No dashboards.")
