"""What nodes report about the store, where runs continue from it, and what its garbage collection
deletes.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.background_jobs import store_garbage
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Checkpoint, NodeStore, Run, StoredCopy
from orchestrator.scheduling import dispatch
from orchestrator.scheduling.placement import resume_points
from tests import factories
from tests.orchestrator.scheduling.conftest import FakeNode
from workers.contracts.wire import encrypted_text
from workers.contracts.wire.maintenance.store import INDEX

pytestmark = pytest.mark.django_db


@pytest.fixture
def node(live_redis: str, settings: Any, tmp_path: Path) -> Node:
    (tmp_path / "store").mkdir()
    settings.ENV = Env(store_url=str(tmp_path / "store"), store_key="AK", store_secret="hush-4711")
    return factories.node("n1", devices=4)


def trained(owner: User, node: Node, *, keep: int = 2, steps: tuple[int, ...] = (10, 20)) -> Run:
    """A running run with checkpoints and their copies."""
    run = factories.run(owner, train={"steps": 90, "seq_len": 64, "checkpoint": {"keep": keep}})
    attempt = factories.running(run, node)
    fake = FakeNode(node)
    for step in steps:
        path = f"runs/{run.pk}/checkpoints/step-{step:08d}"
        fake.send_report(attempt, "checkpoint", step=step, tokens=0, bytes=100, path=path)
        event(fake, attempt, "checkpoint_stored", stored(run, step))
    run.refresh_from_db()
    return run


def stored(run: Run, step: int) -> dict[str, Any]:
    key = f"runs/{run.pk}/checkpoints/step-{step:08d}-0123456789ab"
    return {"key": key, "bytes": 100, "fingerprint": "0" * 64, "step": step, "seconds": 1.5}


def event(fake: FakeNode, attempt: Any, type: str, data: dict[str, Any]) -> None:
    fake.send_report(attempt, "event", type=type, data=data)


def test_copies_are_recorded_and_shown(owner: User, node: Node, settings: Any) -> None:
    run = trained(owner, node)
    rows = factories.api(owner).get(f"/api/v1/runs/{run.pk}/checkpoints").json()["items"]
    assert [row["stored"]["bytes"] for row in rows] == [100, 100]
    assert rows[0]["stored"]["key"].startswith(f"runs/{run.pk}/checkpoints/step-00000010-")
    page = factories.client_for(owner).get(f"/runs/{run.pk}/?tab=checkpoints").content.decode()
    assert page.count("in the store") == 2
    lineage = factories.client_for(owner).get(f"/runs/{run.pk}/?tab=lineage").content.decode()
    assert "Copies in the store" in lineage and rows[0]["stored"]["key"] in lineage
    history = factories.client_for(owner).get(f"/runs/{run.pk}/").content.decode()
    assert "Copied the checkpoint of step 20 to the store" in history


def test_a_copy_of_another_run_is_refused(owner: User, node: Node) -> None:
    run = factories.run(owner)
    attempt = factories.running(run, node)
    data = {**stored(run, 1), "key": f"runs/{run.pk + 1}/checkpoints/step-1-0"}
    event(FakeNode(node), attempt, "checkpoint_stored", data)
    assert not StoredCopy.objects.exists()


def test_a_problem_is_shown_until_the_store_takes_a_copy(
    owner: User, operator: User, node: Node
) -> None:
    run = trained(owner, node)
    attempt, fake = run.attempts.get(), FakeNode(node)
    problem = {"reason": "full", "message": "The store s3://b is full: 507.", "hint": "Free space."}
    event(fake, attempt, "store_problem", problem)
    pages = [f"/runs/{run.pk}/?tab=checkpoints", f"/fleet/{node.name}/", "/account/storage/"]
    browser = factories.client_for(operator)
    for page in pages:
        text = browser.get(page).content.decode()
        assert "training continues" in text and "s3://b is full" in text and "Free space" in text, (
            page
        )
    rest = factories.api(operator).get("/api/v1/storage/store").json()
    assert rest["problems"][0]["reason"] == "full" and rest["copies"] == 2
    assert "hush-4711" not in json.dumps(rest)
    assert run.state == "running"
    event(fake, attempt, "checkpoint_stored", stored(run, 20))
    assert not NodeStore.objects.exists()


def test_orders_have_the_store_with_encrypted_credentials(owner: User, node: Node) -> None:
    run = factories.run(owner)
    attempt = factories.running(run, node)
    plain = dispatch.launch_order(attempt, attempt.placement[0], gpu=False)
    key = fleet.node_secret(node)
    order = dispatch._with_secrets(plain, node, {})
    assert order.store is not None and "hush-4711" not in order.to_json()
    text = encrypted_text.decrypt(key, order.store.credentials, purpose=order.store_purpose)
    assert json.loads(text) == {"key": "AK", "secret": "hush-4711"}


def test_a_run_continues_on_any_node_from_the_store(owner: User, node: Node, settings: Any) -> None:
    run = trained(owner, node)
    FakeNode(node).exited(run.attempts.get(), "lost")
    point = resume_points.of_queued()[run.pk]
    assert point.resume_from["stored"] == stored(run, 20)["key"]
    settings.ENV = Env()
    assert "stored" not in resume_points.of_queued()[run.pk].resume_from


def test_a_fork_and_a_rewind_use_a_checkpoint_that_only_the_store_has(
    owner: User, node: Node
) -> None:
    run = trained(owner, node, keep=1, steps=(10, 20, 30))
    assert Checkpoint.objects.filter(run=run, deleted=None).count() == 1
    fork = runs.run_fork(run=run, by=owner, step=10)
    assert resume_points.of_queued()[fork.pk].stored == stored(run, 10)["key"]
    FakeNode(node).exited(run.attempts.get(), "ok")
    run.refresh_from_db()
    runs.run_rewind(run=run, by=owner, step=10)
    assert resume_points.of_queued()[run.pk].step == 10
    discarded = {row.key: row.reason for row in store_garbage.candidates(now=clock.now())}
    assert discarded == {stored(run, step)["key"]: "discarded" for step in (20, 30)}


def objects(run: Run, folder: str) -> None:
    """The objects of the run's copies."""
    for copy in StoredCopy.objects.filter(run=run):
        place = Path(folder) / copy.key
        place.mkdir(parents=True)
        (place / INDEX).write_text("{}")
        (place / "weights").write_text("w")


def test_copies_of_pruned_checkpoints_are_deleted_and_others_stay(
    owner: User, operator: User, node: Node, settings: Any
) -> None:
    run = trained(owner, node, keep=1, steps=(10, 20, 30))
    objects(run, settings.ENV.store_url)
    dry = store_garbage.collect(dry_run=True, renew=lambda: None)
    assert dry == {"copies": 2, "bytes": 200}
    rest = factories.api(operator).get("/api/v1/storage/copies/candidates").json()
    assert {item["reason"] for item in rest["items"]} == {"superseded"} and rest["bytes"] == 200
    assert store_garbage.collect(dry_run=False, renew=lambda: None) == dry
    left = [path.name for path in Path(settings.ENV.store_url).glob("runs/*/checkpoints/*")]
    assert left == [Path(stored(run, 30)["key"]).name]
    assert store_garbage.collect(dry_run=False, renew=lambda: None) == {"copies": 0, "bytes": 0}


def test_a_pinned_checkpoint_and_one_that_a_fork_needs_stay(owner: User, node: Node) -> None:
    run = trained(owner, node, keep=1, steps=(10, 20, 30))
    Checkpoint.objects.filter(run=run, step=10).update(pinned=True)
    runs.run_fork(run=run, by=owner, step=20)
    assert list(store_garbage.candidates(now=clock.now())) == []


@pytest.mark.parametrize(("policy", "reason"), [("days", "age"), ("gb", "size")])
def test_age_and_size_delete_all_but_the_newest_of_ended_runs(
    owner: User, node: Node, settings: Any, policy: str, reason: str
) -> None:
    run = trained(owner, node, keep=9, steps=(10, 20, 30))
    running = trained(owner, node, keep=9)
    FakeNode(node).exited(run.attempts.get(), "ok")
    Run.objects.filter(pk=run.pk).update(ended=clock.now() - timedelta(days=31))
    limits = {"gc_store_days": 30.0} if policy == "days" else {"gc_store_gb": 1e-7}
    settings.ENV = Env(store_url=settings.ENV.store_url, **limits)
    rows = list(store_garbage.candidates(now=clock.now()))
    assert {(row.run, row.reason) for row in rows} == {(run.pk, reason)} and len(rows) == 2
    assert running.pk not in {row.run for row in rows}


def test_a_deletion_that_fails_is_repeated(
    owner: User, node: Node, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(owner, node, keep=1)
    objects(run, settings.ENV.store_url)
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.runs.store.copies.access.open_store", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store_garbage.collect(dry_run=False, renew=lambda: None)
    assert StoredCopy.objects.exclude(deleted=None).get().removed is None
    store_garbage.collect(dry_run=False, renew=lambda: None)
    assert StoredCopy.objects.exclude(deleted=None).get().removed is not None


def test_an_artifact_is_downloaded_from_the_store(owner: User, node: Node, settings: Any) -> None:
    run = factories.run(owner)
    attempt, fake = factories.running(run, node), FakeNode(node)
    fake.send_report(attempt, "artifact", name="p.json", path="elsewhere/p.json", bytes=2)
    row = run.artifacts.get()
    assert row.name == "attempt-1-p.json"
    key = f"runs/{run.pk}/artifacts/attempt-1-p.json-0123456789ab"
    data = {"key": key, "bytes": 2, "fingerprint": "1" * 64, "name": row.name}
    event(fake, attempt, "artifact_stored", data)
    place = Path(settings.ENV.store_url) / key
    place.mkdir(parents=True)
    (place / INDEX).write_text("{}")
    (place / "p.json").write_text("{}")
    answer = factories.api(owner).get(f"/api/v1/runs/{run.pk}/artifacts/{row.pk}/download")
    assert b"".join(answer.streaming_content) == b"{}"


def test_the_check_writes_reads_and_deletes(operator: User, node: Node, settings: Any) -> None:
    api = factories.api(operator)
    assert api.post("/api/v1/storage/store/check").json() == {"ok": True, "problem": ""}
    assert not list(Path(settings.ENV.store_url).iterdir())
    settings.ENV = Env(store_url="/nowhere/at/all")
    answer = api.post("/api/v1/storage/store/check").json()
    assert not answer["ok"] and "/nowhere/at/all does not exist" in answer["problem"]
    page: Client = factories.client_for(operator)
    text = page.post("/account/storage/store-check/", follow=True).content.decode()
    assert "The store cannot be used" in text


def test_a_wrong_url_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core.exceptions import ImproperlyConfigured

    from orchestrator.config.env import read

    monkeypatch.setenv("ORRERY_STORE_URL", "ftp://somewhere")
    with pytest.raises(ImproperlyConfigured, match="neither s3://bucket/prefix nor an absolute"):
        read.read()
