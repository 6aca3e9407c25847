"""Bundles repeat a run on another installation bit by bit, and refuse what would differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.core.management.base import CommandError

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import bundles
from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.runs.submission.submit import run_submit
from tests import factories
from tests.workers.training.pool import train_alone

pytestmark = pytest.mark.django_db
TEXT = "Now is the winter of our discontent made glorious summer. " * 40


@pytest.fixture(autouse=True)
def data(settings: Any, tmp_path: Path, live_redis: str) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    settings.DATA_ROOTS = [folder]
    factories.node("n1", devices=4)
    return folder


def trained(owner: User, data: Path) -> Run:
    (data / "text.txt").write_text(TEXT)
    return run_submit(
        owner=owner,
        name="original",
        spec={
            "kind": "train",
            "model": "llama-tiny",
            "data": {"path": "text.txt", "format": "text", "tokenizer": "bytes"},
            "train": {"steps": 3, "seq_len": 32, "seed": 7},
        },
    )


def moved(settings: Any, tmp_path: Path) -> Path:
    """The data folder of a fresh installation."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    settings.DATA_ROOTS = [folder]
    return folder


def losses(run: Run, folder: Path) -> list[float]:
    """The losses of the engine with the spec that nodes receive."""
    folder.mkdir()
    return train_alone(runs.launch_spec(run), folder).values("loss")


def test_a_bundle_repeats_losses_bit_by_bit_on_a_fresh_installation(
    owner: User, data: Path, settings: Any, tmp_path: Path
) -> None:
    run = trained(owner, data)
    bundle = factories.api(owner).get(f"/api/v1/runs/{run.pk}/bundle").json()
    assert bundle["spec"]["data"]["path"] == "text.txt" and bundle["spec"]["plan"] == run.plan
    first = losses(run, tmp_path / "first")
    fresh = moved(settings, tmp_path)
    (fresh / "text.txt").write_text(TEXT)
    answer = factories.api(owner).post(
        "/api/v1/runs/from-bundle", {"bundle": bundle}, content_type="application/json"
    )
    assert answer.status_code == 201, answer.json()
    again = Run.objects.get(pk=answer.json()["id"])
    assert again.pk != run.pk and again.plan == run.plan and again.name == "original"
    second = losses(again, tmp_path / "second")
    assert len(first) == 3 and second == first


def test_missing_and_changed_data_are_refused(
    owner: User, data: Path, settings: Any, tmp_path: Path
) -> None:
    bundle = bundles.bundle_of(trained(owner, data))
    fresh = moved(settings, tmp_path)
    with pytest.raises(Refusal) as missing:
        bundles.bundle_submit(owner=owner, bundle=bundle)
    assert "text.txt does not exist" in missing.value.errors[0]["message"]
    assert str(fresh / "text.txt") in missing.value.errors[0]["hint"]
    (fresh / "text.txt").write_text(TEXT + "more")
    with pytest.raises(Refusal) as changed:
        bundles.bundle_submit(owner=owner, bundle=bundle)
    assert "differs from the data of the original run" in changed.value.errors[0]["message"]


def test_bundles_of_other_versions_say_which(owner: User, data: Path) -> None:
    bundle = bundles.bundle_of(trained(owner, data))
    api, path = factories.api(owner), "/api/v1/runs/from-bundle"
    older = {**bundle, "release": "0.1.9"}
    refused = api.post(path, {"bundle": older}, content_type="application/json")
    assert refused.status_code == 409 and "written by release 0.1.9" in refused.json()["detail"]
    assert refused.json()["type"].endswith("bundle-of-another-version")
    accepted = {"bundle": older, "other_versions": True, "name": "again"}
    assert api.post(path, accepted, content_type="application/json").status_code == 201
    for wrong, message in (
        ({**bundle, "format": 9, "release": "2.0"}, "format 9 (release 2.0)"),
        ({"spec": {}}, "not a bundle of a run"),
        ({**bundle, "spec": 3}, "has no spec"),
    ):
        answer = api.post(path, {"bundle": wrong}, content_type="application/json")
        assert answer.status_code == 422 and message in answer.json()["detail"], answer.json()


def test_a_script_takes_its_code_along_and_not_its_secrets(
    owner: User, data: Path, settings: Any, tmp_path: Path
) -> None:
    (data / "code" / "lib").mkdir(parents=True)
    (data / "code" / "train.py").write_text("import lib.parts\n")
    (data / "code" / "lib" / "parts.py").write_text("x = 1\n")
    script = {"command": ["train.py"], "workdir": "code"}
    run = run_submit(owner=owner, name="s", spec={"kind": "script", "script": script})
    bundle = bundles.bundle_of(run)
    assert set(bundle["code"]["files"]) == {"train.py", "lib/parts.py"}
    fresh = moved(settings, tmp_path)
    again = bundles.bundle_submit(owner=owner, bundle=bundle)
    folder = Path(again.spec["script"]["workdir"])
    assert folder.is_relative_to(fresh)
    assert (folder / "lib" / "parts.py").read_text() == "x = 1\n"
    outside = {**bundle, "code": {"../../evil.py": ""}}
    with pytest.raises(Refusal, match="not a name below the program's folder"):
        bundles.bundle_submit(owner=owner, bundle=outside)
    assert not (fresh.parent / "evil.py").exists()
    secret = {**script, "workdir": str(folder), "secrets": {"HF_TOKEN": "hush-4711"}}
    hidden = run_submit(owner=owner, name="t", spec={"kind": "script", "script": secret})
    bundle = bundles.bundle_of(hidden)
    assert bundle["secrets"] == ["HF_TOKEN"] and "hush-4711" not in json.dumps(bundle)
    with pytest.raises(Refusal, match="no values for HF_TOKEN"):
        bundles.bundle_submit(owner=owner, bundle=bundle)


def test_pages_and_command(owner: User, data: Path, tmp_path: Path) -> None:
    run = trained(owner, data)
    browser = factories.client_for(owner)
    page = browser.get(f"/runs/{run.pk}/?tab=config").content.decode()
    assert "Download bundle" in page and f"/runs/{run.pk}/bundle/" in page
    file = browser.get(f"/runs/{run.pk}/bundle/")
    assert file["Content-Disposition"] == f'attachment; filename="run-{run.pk}-bundle.json"'
    upload = SimpleUploadedFile("b.json", file.content, "application/json")
    done = browser.post("/runs/from-bundle/", {"bundle": upload}, follow=True)
    assert "repeats the run of the bundle" in done.content.decode()
    broken = SimpleUploadedFile("b.json", b"{", "application/json")
    done = browser.post("/runs/from-bundle/", {"bundle": broken}, follow=True)
    assert "Choose the file of a bundle" in done.content.decode()
    call_command("bundle", "write", str(run.pk), str(tmp_path / "b.json"))
    before = Run.objects.count()
    call_command("bundle", "submit", str(tmp_path / "b.json"), "--user", owner.username)
    assert Run.objects.count() == before + 1
    with pytest.raises(CommandError, match="no user nowhere"):
        call_command("bundle", "submit", str(tmp_path / "b.json"), "--user", "nowhere")


def test_an_external_run_has_no_bundle(owner: User) -> None:
    run = factories.external_run(owner)
    with pytest.raises(Refusal, match="was not started by Orrery"):
        bundles.bundle_of(run)
