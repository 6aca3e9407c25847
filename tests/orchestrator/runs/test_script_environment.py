"""Packages of script runs: checks at the submit, and what page and REST show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import events
from orchestrator.runs.models import Run
from orchestrator.runs.submission.submit import run_submit
from tests import factories

pytestmark = pytest.mark.django_db

REPORTED = {
    "fingerprint": "f" * 64,
    "seconds": 42.0,
    "built": True,
    "python": "3.11.2",
    "modules": [],
    "packages": ["small==1.0", "torch==2.13.0"],
}


@pytest.fixture
def folder(data_root: Path, live_redis: str) -> Path:
    work = data_root / "project"
    work.mkdir()
    (work / "train.py").write_text("print(1)\n")
    (work / "requirements.txt").write_text("small==1.0\n")
    return work


def submitted(owner: User, folder: Path, environment: dict[str, Any], **spec: Any) -> Run:
    script = {"command": ["train.py"], "workdir": str(folder), "environment": environment}
    return run_submit(owner=owner, name="s", spec={"kind": "script", "script": script, **spec})


def problem(owner: User, folder: Path, environment: dict[str, Any], **spec: Any) -> tuple[str, str]:
    """Field and message of the refusal."""
    with pytest.raises(Refusal) as refused:
        submitted(owner, folder, environment, **spec)
    first = refused.value.errors[0]
    return first["field"].removeprefix("script.environment."), first["message"]


def test_wrong_environments_are_refused_at_the_submit(owner: User, folder: Path) -> None:
    def refused(environment: dict[str, Any], **spec: Any) -> tuple[str, str]:
        return problem(owner, folder, environment, **spec)

    assert refused({"lock": "uv.lock"})[1] == "there is no file uv.lock in the work folder"
    (folder / "uv.lock").write_text("version = 1\n")
    assert "no pyproject.toml" in refused({"lock": "uv.lock"})[1]
    for lock in ("../requirements.txt", "/etc/passwd", "train.py"):
        assert refused({"lock": lock})[0] == "lock"
    (folder / "outside").symlink_to("/etc")
    assert refused({"lock": "outside/requirements.txt"})[0] == "lock"
    assert refused({"modules": ["cuda; rm -rf /"]})[0].startswith("modules")
    assert refused({"python": "/bin/sh", "modules": ["x"]})[0] == "python"
    assert refused({"python": "python3"})[0] == "python"
    both = {"lock": "requirements.txt", "modules": ["x"], "python": "python3"}
    assert refused(both)[0] == "node_packages"
    image = {"resources": {"image": "nvcr.io/x:1"}}
    assert "has its own packages" in refused({"lock": "requirements.txt"}, **image)[1]


def test_page_and_rest_show_what_the_newest_attempt_installed(owner: User, folder: Path) -> None:
    run = submitted(owner, folder, {"lock": "requirements.txt"})
    api, browser = factories.api(owner), factories.client_for(owner)
    before = api.get(f"/api/v1/runs/{run.pk}/code").json()["environment"]
    assert before["lock"] == "requirements.txt" and before["packages"] == []
    page = browser.get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert "A node installs the packages when the run starts." in page
    new = events.NewEvent(type="environment_prepared", data=REPORTED, attempt=1)
    events.record(run=run, new=[new])
    after = api.get(f"/api/v1/runs/{run.pk}/code").json()["environment"]
    assert after["packages"] == REPORTED["packages"] and after["seconds"] == 42.0
    page = browser.get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert "2 packages" in page and "torch==2.13.0" in page and "42 s" in page
    assert "installed by the newest attempt" in page
    listed = browser.get(f"/runs/{run.pk}/?tab=events").content.decode()
    assert "Installed 2 packages in 42 s" in listed


def test_modules_need_no_work_folder(owner: User) -> None:
    script = {"command": ["-m", "x"], "environment": {"modules": ["cuda/12.4"]}}
    run = run_submit(owner=owner, name="m", spec={"kind": "script", "script": script})
    page = factories.client_for(owner).get(f"/runs/{run.pk}/?tab=code").content.decode()
    assert "cuda/12.4" in page and "No stored code" not in page
    alone = run_submit(
        owner=owner, name="n", spec={"kind": "script", "script": {"command": ["-m", "x"]}}
    )
    answer = factories.api(owner).get(f"/api/v1/runs/{alone.pk}/code").json()
    assert answer["environment"] is None
