"""What garbage collection deletes, what it never deletes, and what nodes report."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.background_jobs import garbage
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.fleet.models import Node
from orchestrator.runs import services as runs
from orchestrator.runs.models import Checkpoint, Deletion, Run, StoredFolder
from orchestrator.scheduling.reports.handler import report
from tests import factories
from tests.orchestrator.scheduling.conftest import FakeNode
from workers.contracts.wire import names
from workers.contracts.wire.maintenance.storage import CollectOrder

pytestmark = pytest.mark.django_db

NO_FOLDERS = {"attempt_folders": 0, "attempt_folder_bytes": 0}
STEPS = (10, 20, 30, 40)


@pytest.fixture
def node(live_redis: str, settings: Any) -> Node:
    settings.ENV = Env(gc_checkpoint_days=30)
    return factories.node("n1", devices=4)


def ended(owner: User, node: Node, *, days: float = 31.0, size: int = 100) -> Run:
    """A run with four checkpoints that ended some days ago."""
    run = factories.run(owner, train={"steps": 50, "seq_len": 64, "checkpoint": {"keep": 9}})
    attempt = factories.running(run, node)
    for step in STEPS:
        runs.checkpoint_record(
            run=run,
            attempt=1,
            step=step,
            path=f"runs/{run.pk}/checkpoints/step_{step}",
            bytes=size,
        )
    FakeNode(node).exited(attempt, "ok")
    Run.objects.filter(pk=run.pk).update(ended=clock.now() - timedelta(days=days))
    run.refresh_from_db()
    return run


def collect(*, dry_run: bool = False) -> dict[str, int]:
    return garbage.collect_garbage(dry_run=dry_run, renew=lambda: None)


def retained(run: Run) -> list[int]:
    return sorted(Checkpoint.objects.filter(run=run, deleted=None).values_list("step", flat=True))


def test_a_dry_run_counts_what_a_run_deletes(
    owner: User, node: Node, operator: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recent = ended(owner, node), ended(owner, node, days=1.0)
    sent: list[CollectOrder] = []
    monkeypatch.setattr(
        "orchestrator.background_jobs.garbage.dispatch.collect",
        lambda node, **paths: sent.append(CollectOrder(**paths)) or True,
    )
    counted = collect(dry_run=True)
    assert counted == {"checkpoints": 3, "checkpoint_bytes": 300, **NO_FOLDERS}
    assert retained(run) == list(STEPS) and not sent and not Deletion.objects.exists()
    rest = factories.api(operator).get("/api/v1/storage/candidates").json()
    assert rest["bytes"] == 300 and {item["nodes"][0] for item in rest["items"]} == {"n1"}
    assert collect() == {**counted, "orders": 1}
    assert retained(run) == [40] and retained(recent) == list(STEPS)
    assert collect() == {
        "checkpoints": 0,
        "checkpoint_bytes": 0,
        **NO_FOLDERS,
        "orders": 1,
    }
    first, again = sent
    assert sorted(first.checkpoints) == [
        f"runs/{run.pk}/checkpoints/step_{s}" for s in (10, 20, 30)
    ]
    assert again.checkpoints == []  # an order without answer is repeated later

    fake = FakeNode(node)
    body = {
        "collected": [
            {"path": first.checkpoints[0], "bytes": 77},
            {"path": first.checkpoints[1], "problem": "An attempt of this run is active."},
        ],
        "runs": [
            {"name": str(run.pk), "bytes": 5, "modified": 1.0},
            {"name": "999999", "bytes": 9, "modified": 1.0},
        ],
    }
    for _ in range(2):
        assert report(fake.sealed(names.KIND_COLLECTED, body))
    assert Deletion.objects.get(path=first.checkpoints[0]).freed == 77
    assert list(StoredFolder.objects.order_by("name").values_list("name", "orphan")) == [
        (str(run.pk), False),
        ("999999", True),
    ]
    page = factories.client_for(operator).get("/account/storage/").content.decode()
    assert "runs/999999" in page and "An attempt of this run is active" in page
    listed = factories.api(operator).get("/api/v1/storage/folders?orphan=true").json()["items"]
    assert [item["name"] for item in listed] == ["999999"]
    assert len(factories.api(operator).get("/api/v1/storage/deletions").json()["items"]) == 3


def test_best_pinned_and_referenced_checkpoints_stay(
    owner: User, stranger: User, node: Node
) -> None:
    run = ended(owner, node)
    rows = list(Checkpoint.objects.filter(run=run).order_by("step"))
    protected = garbage.protected_checkpoints(run, set(), rows)
    assert [row.step for row in rows if row.pk in protected] == [40]
    api = factories.api(owner)
    path = f"/api/v1/runs/{run.pk}/checkpoints"
    assert api.post(f"{path}/10/pin").json()["pinned"] is True
    assert api.post(f"{path}/11/pin").status_code == 422
    assert factories.api(stranger).post(f"{path}/20/pin").status_code == 403  # a viewer
    other = factories.run(owner)
    spec = {**other.spec, "notes": f"from runs/{run.pk}/checkpoints/step_20"}
    Run.objects.filter(pk=other.pk).update(spec=spec)
    collect()
    assert retained(run) == [10, 20, 40]
    client = factories.client_for(owner)
    client.post(f"/runs/{run.pk}/act/", {"action": "unpin", "step": "10"})
    assert 'value="unpin"' not in client.get(f"/runs/{run.pk}/?tab=checkpoints").content.decode()
    collect()
    assert retained(run) == [20, 40]


def test_the_checkpoint_with_the_lowest_loss_is_the_best(
    owner: User, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended(owner, node)
    curves = {
        "val_loss": ([9.0, 19.0, 29.0, 39.0], [3.0, 1.0, float("nan"), 2.0]),
        "loss": ([10.0], [0.0]),
    }

    class Curve:
        def __init__(self, name: str) -> None:
            self.x, self.y = curves[name]

    monkeypatch.setattr(garbage.telemetry, "series", lambda *, run, name, points: Curve(name))
    collect()
    assert retained(run) == [20, 40]


def test_total_size_deletes_the_runs_that_ended_first(
    owner: User, node: Node, settings: Any
) -> None:
    settings.ENV = Env(gc_checkpoint_gb=1.0)
    older, newer = (ended(owner, node, days=days, size=200_000_000) for days in (2.0, 1.0))
    collect()
    assert retained(older) == [40] and retained(newer) == list(STEPS)


def test_folders_of_old_runs_are_deleted_once(owner: User, node: Node, settings: Any) -> None:
    settings.ENV = Env(gc_folder_days=30)
    run = ended(owner, node)
    ended(owner, node, days=1.0)
    assert collect(dry_run=True)["attempt_folders"] == 1
    assert collect()["attempt_folders"] == 1
    Deletion.objects.update(done=clock.now())
    assert collect()["attempt_folders"] == 0
    assert Deletion.objects.get().path == f"runs/{run.pk}/attempt-1"


def test_without_settings_nothing_is_deleted(owner: User, node: Node, settings: Any) -> None:
    settings.ENV = Env()
    run = ended(owner, node, days=1000.0)
    assert collect(dry_run=True)["checkpoints"] == 0 and retained(run) == list(STEPS)
