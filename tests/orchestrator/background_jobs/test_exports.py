"""Exports: built by the job, downloaded by their owner only, deleted when they expire."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs.exports import requests
from orchestrator.background_jobs.models import Export
from orchestrator.config.env.variables import Env
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def home(tmp_path: Path, settings: Any) -> Path:
    settings.ENV = Env(home=tmp_path, export_days=7)
    return tmp_path


def build(**options: Any) -> dict[str, int]:
    return requests.build_exports(**{"dry_run": False, "renew": lambda: None, **options})


def content_of(answer: Any) -> bytes:
    """The body of a file response; closes the file but not the test's database connection."""
    assert answer.status_code == 200
    content: bytes = answer.getvalue()
    for close in answer._resource_closers:
        if close.__name__ == "close" and hasattr(close.__self__, "name"):
            close()
    return content


def measured(run: Run) -> None:
    """Two points, two lines and an event of an external run."""
    api = factories.api(run.owner)
    points = [
        {"seq": n, "step": n, "tokens": n, "time": 1.0, "rank": 0, "values": {"a/b": n / 2}}
        for n in (1, 2)
    ]
    lines = [{"seq": n, "time": 1.0, "text": f"line {n}"} for n in (1, 2)]
    base = f"/api/v1/runs/{run.pk}"
    for path, body in (("points", {"points": points}), ("logs", {"lines": lines})):
        answer = api.post(f"{base}/{path}", body, content_type="application/json")
        assert answer.status_code < 300, answer.content
    runs.event_record(run=run, type="note", data={"n": 1})


def test_an_export_has_everything_and_expires(owner: User, run: Run, clock: Any) -> None:
    measured(run)
    api = factories.api(owner)
    made = api.post("/api/v1/exports", {"run": run.pk}, content_type="application/json").json()
    path = f"/api/v1/exports/{made['id']}"
    assert api.get(f"{path}/download").status_code == 409
    assert build(dry_run=True) == {"built": 1, "expired": 0}
    assert build() == {"built": 1, "expired": 0} and build() == {"built": 0, "expired": 0}
    ready = api.get(path).json()
    answer = api.get(f"{path}/download")
    content = content_of(answer)
    assert ready["state"] == "ready" and ready["bytes"] == len(content)
    archive = zipfile.ZipFile(io.BytesIO(content))
    folder = f"run-{run.pk}"
    assert json.loads(archive.read(f"{folder}/run.json"))["id"] == str(run.pk)
    series = archive.read(f"{folder}/series/a%2Fb.csv").decode().splitlines()
    assert series[0].startswith("attempt,rank,seq,step") and len(series) == 3
    lines = archive.read(f"{folder}/logs.jsonl").decode().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["line 1", "line 2"]
    assert '"note"' in archive.read(f"{folder}/events.jsonl").decode()
    file = requests.file_of(Export.objects.get())
    assert file.stat().st_mode & 0o777 == 0o600
    clock.advance(8 * 24 * 3600)
    assert build(dry_run=True)["expired"] == 1 and file.exists()
    assert build()["expired"] == 1 and not file.exists()
    assert api.get(path).status_code == 404


def test_only_the_owner_downloads_and_only_what_the_owner_may_see(
    owner: User, teammate: User, stranger: User, admin: User, run: Run
) -> None:
    api = factories.api(teammate)
    body = {"run": run.pk}
    assert (
        factories.api(stranger).post("/api/v1/exports", body, "application/json").status_code == 404
    )
    made = api.post("/api/v1/exports", body, "application/json").json()
    build()
    path = f"/api/v1/exports/{made['id']}/download"
    for other in (owner, admin):
        assert factories.api(other).get(path).status_code == 404
    answer = api.get(path)
    assert content_of(answer).startswith(b"PK")
    teammate.teams.clear()
    assert api.get(path).status_code == 404
    queued = Export.objects.create(
        owner=teammate, kind="run", target=run.pk, expires=Export.objects.get().expires
    )
    build()
    queued.refresh_from_db()
    assert queued.state == "failed" and queued.error


def test_experiments_limits_and_the_page(owner: User, settings: Any, home: Path) -> None:
    experiment = runs.experiment_create(owner=owner, name="question")
    first, second = factories.external_run(owner), factories.external_run(owner)
    Run.objects.update(experiment=experiment)
    page = factories.client_for(owner)
    body = {"kind": "experiment", "target": str(experiment.pk)}
    assert page.post("/account/exports/", body).status_code == 302
    assert build()["built"] == 1
    names = zipfile.ZipFile(requests.file_of(Export.objects.get())).namelist()
    assert {f"run-{first.pk}/run.json", f"run-{second.pk}/run.json"} <= set(names)
    assert "Download" in page.get("/account/exports/").content.decode()
    assert page.post("/account/exports/", {"target": "x"}).status_code == 422
    settings.ENV = Env(home=home, export_mb=1e-6)
    large = requests.export_request(by=owner, run=first.pk)
    build()
    large.refresh_from_db()
    assert large.state == "failed" and "more than" in large.error
    assert not list((home / "exports").glob("*.part"))
    assert page.post(f"/account/exports/{large.pk}/delete/").status_code == 302
    for _ in range(requests.MOST - 1):
        requests.export_request(by=owner, run=first.pk)
    again = factories.api(owner).post("/api/v1/exports", {"run": first.pk}, "application/json")
    assert again.status_code == 409
    both = {"run": first.pk, "experiment": experiment.pk}
    assert factories.api(owner).post("/api/v1/exports", both, "application/json").status_code == 422
