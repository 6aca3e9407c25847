"""Sessions that record copies while others collect garbage: no row names objects that are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction

from orchestrator.background_jobs import garbage, store_garbage
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from orchestrator.config.env.variables import Env
from orchestrator.runs import services as runs
from orchestrator.runs.datasets import registration, services
from orchestrator.runs.datasets.models import DataSetVersion
from orchestrator.runs.lifecycle import lineage
from orchestrator.runs.models import Checkpoint, Deletion, Run, StoredCopy
from orchestrator.runs.store import copies, readers
from orchestrator.runs.store.resumable import resumable
from orchestrator.runs.submission import submit
from tests import factories
from tests.orchestrator.runs.test_races import at_once
from workers.contracts.wire.maintenance.data_sets import DataAnswer, data_key
from workers.contracts.wire.maintenance.store import INDEX, CopyIndex, CopyStored, StoredFile

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def store(settings: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    settings.ENV = Env(home=tmp_path / "home", store_url=str(folder))
    return folder


def collect() -> dict[str, int]:
    return store_garbage.collect(dry_run=False, renew=lambda: None)


def in_another_session(act: Callable[[], Any]) -> None:
    """Do it in a thread with a connection of its own, to its end."""

    def run() -> None:
        try:
            act()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.fixture
def meanwhile(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Does something in another session once, just before or after objects are deleted."""
    acts: list[Callable[[], Any]] = []
    original = copies.remove_objects

    def remove(key: str) -> None:
        for after in (False, True):
            if after:
                original(key)
            if after is (request.param == "after") and acts:
                in_another_session(acts.pop())

    monkeypatch.setattr(copies, "remove_objects", remove)
    yield acts.append
    assert not acts, "objects were deleted"


def written(store: Path, key: str) -> None:
    """What a node does: nothing for a copy that it finds complete."""
    folder = store / key
    if not (folder / INDEX).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text("weights")
        file = StoredFile(bytes=7, sha256="0" * 64)
        index = CopyIndex(kind="data", fingerprint="", bytes=7, files={"weights": file})
        (folder / INDEX).write_text(index.to_json())


def recorded(store: Path, run: Run, step: int) -> StoredCopy:
    key = f"runs/{run.pk}/checkpoints/step-{step:08d}-0123456789ab"
    written(store, key)
    stored = CopyStored(key=key, bytes=7, fingerprint="0" * 64, step=step, seconds=0.1)
    return copies.copy_recorded(run=run, attempt=1, node="n1", stored=stored)


def is_true(store: Path, row: StoredCopy) -> bool:
    """Whether the row says what the store has: a copy that is not deleted is complete."""
    row.refresh_from_db()
    return row.deleted is not None or (store / row.key / INDEX).exists()


@pytest.mark.parametrize("meanwhile", ["before", "after"], indirect=True)
def test_a_copy_that_is_recorded_again_while_it_is_deleted(
    store: Path, meanwhile: Callable[[Any], None]
) -> None:
    run = factories.run(factories.user("ada"))
    copy = recorded(store, run, 10)  # of no checkpoint: garbage
    meanwhile(lambda: recorded(store, run, 10))
    collect()
    assert is_true(store, copy) and copy.deleted is not None
    collect()
    assert not (store / copy.key).exists() and copy.removed is None
    again = recorded(store, run, 10)  # a later upload is a copy like any other
    assert again.deleted is None and is_true(store, again)


def test_a_copy_that_is_deleted_just_before_it_is_recorded_again(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has found it complete; the index is gone when its report is applied."""
    run = factories.run(factories.user("ada"))
    copy = recorded(store, run, 10)
    collects = once(collect)

    class Transaction:
        @staticmethod
        def atomic() -> Any:
            collects()
            return transaction.atomic()

    monkeypatch.setattr(copies, "transaction", Transaction)
    recorded(store, run, 10)
    assert is_true(store, copy) and copy.deleted is not None


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text("part")])
def test_an_index_without_its_objects_is_no_copy(
    store: Path, change: Callable[[Path], Any]
) -> None:
    """A node may write the index just after the objects that it found were deleted."""
    run = factories.run(factories.user("ada"))
    copy = recorded(store, run, 10)
    assert copies.copy_collect(copy, since=clock.now())
    change(store / copy.key / "weights")
    assert recorded(store, run, 10).deleted is not None
    collect()
    assert not (store / copy.key).exists()


def test_a_copy_that_is_recorded_again_before_its_removal_stays(store: Path) -> None:
    run = factories.run(factories.user("ada"))
    copy = recorded(store, run, 10)
    assert copies.copy_collect(copy, since=clock.now())
    marked = StoredCopy.objects.get(pk=copy.pk)  # as another worker has read it
    recorded(store, run, 10)
    copies.remove(marked)
    copy.refresh_from_db()
    assert copy.deleted is None and (store / copy.key / INDEX).exists()


def test_a_store_that_does_not_answer_leaves_what_was_recorded(
    store: Path, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = factories.run(factories.user("ada"))
    copy = recorded(store, run, 10)
    assert copies.copy_collect(copy, since=clock.now())
    settings.DATA_ROOTS = [tmp_path]
    key = data_key("f" * 64)
    with monkeypatch.context() as patch:
        patch.setattr(copies.access, "open_store", lambda: 1 / 0)
        assert recorded(store, run, 10).deleted is None
        imported = services.data_set_import(
            by=factories.user("bob", role="submitter"),
            name="other",
            files={"a.txt": {"bytes": 5, "sha256": "0" * 64}},
            folder=False,
            format="text",
            notes="",
            key=key,
        )
    imported.refresh_from_db()
    assert (imported.state, imported.key) == ("stored", key)


def test_workers_that_collect_at_once_while_nodes_record(store: Path) -> None:
    """As if a lease had ended while its job ran on."""
    run = factories.run(factories.user("ada"))
    rows = [recorded(store, run, step) for step in range(30)]
    at_once(
        collect,
        collect,
        lambda: [recorded(store, run, step) for step in range(0, 30, 3)],
        lambda: [recorded(store, run, step) for step in range(30, 40)],
        collect,
    )
    rows += StoredCopy.objects.exclude(pk__in=[row.pk for row in rows])
    assert len(rows) == 40 and all(is_true(store, row) for row in rows)
    collect()
    collect()
    for row in rows:
        row.refresh_from_db()
        assert row.deleted is not None and not (store / row.key).exists()


@pytest.fixture
def old_run(store: Path, settings: Any) -> Run:
    """An ended run whose checkpoints of steps 10 and 20 may go, on disk and in the store."""
    limits = {"gc_store_days": 30.0, "gc_checkpoint_days": 30.0}
    settings.ENV = settings.ENV.model_copy(update=limits)
    owner = factories.user("ada", role="submitter")
    run = factories.run(owner, train={"steps": 90, "seq_len": 64, "checkpoint": {"keep": 9}})
    Run.objects.filter(pk=run.pk).update(
        state="finished", ended=clock.now() - timedelta(days=31), attempt_number=1
    )
    for step in (10, 20, 30):
        path = f"runs/{run.pk}/checkpoints/step-{step:08d}"
        runs.checkpoint_record(run=run, attempt=1, step=step, path=path, bytes=7)
        recorded(store, run, step)
    run.refresh_from_db()
    return run


def collect_all(renew: Callable[[], None] = lambda: None) -> None:
    garbage.collect_garbage(dry_run=False, renew=renew)
    store_garbage.collect(dry_run=False, renew=renew)


def once(act: Callable[[], Any]) -> Callable[[], None]:
    """Does it at the first call, in another session."""
    acts = [act]

    def do() -> None:
        if acts:
            in_another_session(acts.pop())

    return do


def fork(run: Run) -> Run:
    return runs.run_fork(run=Run.objects.get(pk=run.pk), by=run.owner, step=10)


def name(run: Run) -> Run:
    """Submit a run whose spec names the checkpoint."""
    path = f"runs/{run.pk}/checkpoints/step-00000010"
    spec = factories.spec(notes=f"compares with {path}")
    return runs.run_submit(owner=run.owner, name="reader", spec=spec)


def rewind(run: Run) -> Run:
    return runs.run_rewind(run=Run.objects.get(pk=run.pk), by=run.owner, step=10)


@pytest.mark.parametrize("use", [fork, name, rewind])
@pytest.mark.parametrize("part", ["disk", "store"])
def test_what_begins_to_use_a_selected_checkpoint_keeps_it(
    old_run: Run, store: Path, use: Callable[[Run], Run], part: str
) -> None:
    """Garbage collection has chosen the checkpoint, and deletes it a moment later."""
    act = once(lambda: use(old_run))
    if part == "disk":
        garbage.collect_garbage(dry_run=False, renew=act)
    else:
        store_garbage.collect(dry_run=False, renew=act)
    assert Run.objects.exclude(pk=old_run.pk).count() == (use is not rewind)
    stays = Checkpoint.objects.get(run=old_run, step=10)
    assert stays.deleted is None and stays.copy is not None and is_true(store, stays.copy)
    assert stays.copy.deleted is None


@pytest.mark.parametrize("use", [fork, name])
def test_a_submission_for_a_checkpoint_that_is_deleted_meanwhile_is_refused(
    old_run: Run, use: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec was checked while the checkpoint was there."""
    original = submit.check

    def check(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        in_another_session(collect_all)
        return result

    monkeypatch.setattr(submit, "check", check)
    with pytest.raises(Refusal) as refused:
        use(old_run)
    assert "deleted" in refused.value.detail
    assert list(Run.objects.all()) == [old_run] and not Deletion.objects.filter(run=0).exists()
    assert Checkpoint.objects.get(run=old_run, step=10).deleted is not None


def test_a_deleted_copy_of_a_retained_checkpoint_refuses_nothing(old_run: Run) -> None:
    copy = Checkpoint.objects.get(run=old_run, step=10).copy
    assert copy is not None
    StoredCopy.objects.filter(pk=copy.pk).update(deleted=clock.now())
    names = {old_run.pk: {copy.key.removeprefix(f"runs/{old_run.pk}/")}}
    readers.require_retained(names, since=clock.now())
    Checkpoint.objects.filter(run=old_run, step=10).update(deleted=clock.now())
    with pytest.raises(Refusal, match="was deleted a moment ago") as refused:
        readers.require_retained(names, since=clock.now())
    assert refused.value.retry


def test_a_rewind_to_a_checkpoint_that_is_deleted_meanwhile_is_refused(
    old_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = lineage._no_steps_left

    def collects_first(*args: Any) -> Any:
        Checkpoint.objects.filter(run=old_run, step=10).update(deleted=clock.now(), copy=None)
        return original(*args)

    monkeypatch.setattr(lineage, "_no_steps_left", collects_first)
    with pytest.raises(Refusal, match="no retained checkpoint of step 10"):
        rewind(old_run)
    old_run.refresh_from_db()
    assert old_run.state == "finished"


def test_forks_and_collections_at_once(old_run: Run, store: Path) -> None:
    """Whatever is first, no queued fork lacks its checkpoint."""
    results = at_once(
        *[lambda: fork(old_run) for _ in range(3)], collect_all, lambda: name(old_run), collect_all
    )
    assert all(isinstance(each, Refusal | Run | None) for each in results)
    parent = Checkpoint.objects.get(run=old_run, step=10)
    if Run.objects.filter(forked_from=old_run).exists():
        assert resumable(run=old_run).filter(pk=parent.pk).exists()
    if Run.objects.filter(name="reader").exists():
        assert parent.deleted is None
    assert parent.copy is not None and is_true(store, parent.copy)


@pytest.mark.parametrize("meanwhile", ["before", "after"], indirect=True)
def test_a_data_set_that_is_registered_while_the_same_content_is_deleted(
    store: Path,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Any], None],
) -> None:
    settings.DATA_ROOTS = [tmp_path]
    (tmp_path / "a.txt").write_text("to be")
    ada, fingerprint = factories.user("ada", role="submitter"), "f" * 64
    key = data_key(fingerprint)
    index = CopyIndex.model_construct(fingerprint=fingerprint, bytes=5, files={})

    def answers(*_: Any) -> Iterator[DataAnswer]:
        written(store, key)
        yield DataAnswer.model_construct(index=index, unreadable="", stored=None, problem=None)
        yield DataAnswer.model_construct(
            index=None, unreadable="", stored=key, sent_bytes=0, problem=None
        )

    def read() -> None:
        registration.register_waiting(dry_run=False, renew=lambda: None)

    monkeypatch.setattr(registration, "_answers", answers)
    old = services.data_set_register(by=ada, name="old", path="a.txt")
    read()
    DataSetVersion.objects.filter(pk=old.pk).update(deleted=clock.now())
    new = services.data_set_register(by=ada, name="new", path="a.txt")
    meanwhile(read)
    collect()
    new.refresh_from_db()
    old.refresh_from_db()
    assert (new.state, new.key) == ("fingerprinted", "") and old.removed is not None
    read()
    new.refresh_from_db()
    assert new.state == "stored" and (store / new.key / INDEX).exists()
    collect()
    assert (store / new.key / INDEX).exists()
