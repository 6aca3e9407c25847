"""Copies are complete or absent, continue where they stopped, and read back as written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import S3Server, refusing
from workers.contracts.wire.maintenance.store import INDEX, CopyIndex, copy_key
from workers.contracts.wire.maintenance.store_work import StoreDone, StoreWork
from workers.store import copies, multipart
from workers.store.access import Store, explain, open_store
from workers.store.uploader import Uploader


def checkpoint(folder: Path, *, size: int = 1000, step: int = 4) -> Path:
    """A checkpoint's folder with two files and its manifest."""
    folder = folder / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name in ("__0_0.distcp", "nested/.metadata"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(size))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files[name] = {"bytes": size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "files": files}))
    return folder


def put(store: Store, folder: Path) -> tuple[str, CopyIndex, int]:
    index = copies.describe(folder, kind="checkpoint", about={"step": 4})
    key = copy_key("7", "checkpoint", folder.name, index.fingerprint)
    return key, index, copies.put(store, folder, key, index)


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_copy_reads_back_as_it_was_written(store: Store, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    key, index, sent = put(store, folder)
    assert sent == index.bytes and key.startswith("runs/7/checkpoints/step-00000004-")
    assert put(store, folder)[2] == 0  # nothing is sent again
    target = tmp_path / "other" / "step-00000004"
    target.parent.mkdir()
    assert copies.get(store, key, target) == index
    assert contents(target) == contents(folder)


@pytest.mark.parametrize(("mode", "expected"), [(0o777, 0o1777), (0o755, None)])
def test_folders_above_copies_are_shared_if_the_store_is(
    tmp_path: Path, mode: int, expected: int | None
) -> None:
    """Else a user's first copy would refuse those of the next user."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    key, _, _ = put(open_store(url=f"file://{root}"), checkpoint(tmp_path))
    modes = {path.stat().st_mode & 0o7777 for path in (root / "runs", root / "runs/7")}
    own = (root / key).stat().st_mode & 0o7777
    assert modes == {expected} if expected is not None else modes == {own}
    assert not own & 0o002


def test_an_artifact_is_one_file(store: Store, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    index = copies.describe(tmp_path / "profile.json", kind="artifact", about={})
    copies.put(store, tmp_path / "profile.json", "runs/7/artifacts/p", index)
    copies.get(store, "runs/7/artifacts/p", tmp_path / "back")
    assert contents(tmp_path / "back") == {"profile.json": b"{}"}


def test_a_copy_without_index_does_not_exist(store: Store, tmp_path: Path) -> None:
    key, _, _ = put(store, checkpoint(tmp_path))
    store.fs.rm(f"{store.path(key)}/{INDEX}")
    with pytest.raises(copies.Damaged, match="no complete copy"):
        copies.get(store, key, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_changed_bytes_are_refused(store: Store, tmp_path: Path) -> None:
    key, index, _ = put(store, checkpoint(tmp_path))
    name = "__0_0.distcp"
    store.fs.pipe_file(f"{store.path(key)}/{name}", bytes(index.files[name].bytes))
    with pytest.raises(copies.Damaged, match="does not have the checksum"):
        copies.get(store, key, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_index_of_another_version_is_refused(store: Store, tmp_path: Path) -> None:
    key, index, _ = put(store, checkpoint(tmp_path))
    document = {**index.to_dict(), "version": 9}
    store.fs.pipe_file(f"{store.path(key)}/{INDEX}", json.dumps(document).encode())
    with pytest.raises(copies.Damaged, match="version 9, this release reads 1"):
        copies.get(store, key, tmp_path / "target")


def test_files_that_are_deleted_during_an_upload_are_sent_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the removal of an earlier copy, which deletes the index first."""
    folder = checkpoint(tmp_path)
    key, index, _ = put(store, folder)
    store.fs.rm(f"{store.path(key)}/{INDEX}")
    original = copies._sizes
    removals = [lambda: store.fs.rm(store.path(key), recursive=True)]

    def sizes(store: Store, key: str) -> dict[str, int]:
        listed = original(store, key)
        while removals:
            removals.pop()()
        return listed

    monkeypatch.setattr(copies, "_sizes", sizes)
    assert put(store, folder)[2] == index.bytes
    copies.get(store, key, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(folder)


def test_an_interrupted_upload_continues_and_the_previous_copy_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)  # the least that S3 allows
    monkeypatch.setattr(copies, "_CHUNK", 1 << 20)
    before, _, _ = put(store, checkpoint(tmp_path / "a", size=100))
    folder = checkpoint(tmp_path / "b", size=12 << 20, step=8)
    _break_after(store, monkeypatch, calls=2)
    with pytest.raises(OSError, match="cut off"):
        put(store, folder)
    monkeypatch.undo()
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(copies, "_CHUNK", 1 << 20)
    index = copies.describe(folder, kind="checkpoint", about={})
    key = copy_key("7", "checkpoint", folder.name, index.fingerprint)
    assert copies.read_index(store, key) is None
    copies.get(store, before, tmp_path / "previous")
    key, index, sent = put(store, folder)
    assert 0 < sent <= index.bytes - (5 << 20)
    copies.get(store, key, tmp_path / "whole")
    assert contents(tmp_path / "whole") == contents(folder)


def _break_after(store: Store, monkeypatch: pytest.MonkeyPatch, *, calls: int) -> None:
    """Let the connection (or the process, of a folder) end after some parts."""
    if store.scheme == "s3":
        original, count = store.fs.call_s3, iter(range(100))

        def call(method: str, **arguments: Any) -> Any:
            if method == "upload_part" and next(count) >= calls:
                raise OSError("cut off")
            return original(method, **arguments)

        monkeypatch.setattr(store.fs, "call_s3", call)
        return

    def copy(source: Any, target: Any, length: int) -> None:
        target.write(source.read(6 << 20))
        target.flush()
        raise OSError("cut off")

    monkeypatch.setattr(copies.shutil, "copyfileobj", copy)


@pytest.mark.parametrize(
    ("status", "code", "reason", "hint"),
    [
        (403, "InvalidAccessKeyId", "credentials", "ORRERY_STORE_KEY"),
        (403, "SignatureDoesNotMatch", "credentials", "ORRERY_STORE_SECRET"),
        (404, "NoSuchBucket", "bucket", "ORRERY_STORE_URL"),
        (507, "XMinioStorageFull", "full", "ORRERY_GC_STORE_GB"),
        (403, "QuotaExceeded", "full", "quota"),
    ],
)
def test_refusals_are_explained(status: int, code: str, reason: str, hint: str) -> None:
    with refusing(status, code) as endpoint:
        store = open_store(url="s3://b/c", endpoint=endpoint, region="r", key="k", secret="s")
        with pytest.raises(OSError) as caught:
            store.fs.call_s3("put_object", Bucket="b", Key="x", Body=b"")
    problem = explain(caught.value, store)
    assert problem.reason == reason and hint in problem.hint
    assert "s3://b/c" in problem.message


def test_a_store_that_does_not_answer_and_a_missing_folder(tmp_path: Path) -> None:
    store = open_store(url=f"file://{tmp_path}/missing")
    with pytest.raises(OSError) as caught:
        put(store, checkpoint(tmp_path))
    assert explain(caught.value, store).reason == "bucket"
    assert "does not exist" in explain(caught.value, store).message
    assert explain(ConnectionRefusedError(111, "refused"), store).reason == "unreachable"
    full = OSError(28, "No space left on device")
    assert explain(full, store).reason == "full"


def test_another_kind_of_url_is_refused() -> None:
    with pytest.raises(ValueError, match="neither s3://bucket/prefix nor an absolute folder"):
        open_store(url="ftp://host/folder")


def test_a_full_store_is_retried_until_it_takes_the_copy(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, answers = s3.open(s3.bucket()), []
    failures = iter([OSError(28, "No space left"), OSError(28, "No space left")])
    original = copies.put

    def put_once_there_is_space(*arguments: Any) -> int:
        for error in failures:
            raise error
        return original(*arguments)

    monkeypatch.setattr(copies, "put", put_once_there_is_space)
    uploader = Uploader(store, answers.append, first_wait_s=0.001)
    uploader.add(work(1, checkpoint(tmp_path)))
    uploader.end()
    uploader.run()
    assert [answer.problem.reason for answer in answers[:-1]] == ["full"]  # reported once
    assert answers[-1].stored is not None and answers[-1].stored.step == 4


def work(number: int, folder: Path, **more: Any) -> StoreWork:
    step = int(folder.name[5:])
    return StoreWork(
        number=number,
        kind="checkpoint",
        source=str(folder),
        run="7",
        name=folder.name,
        hold=str(folder.with_name(f".store-{folder.name}")),
        about={"step": step},
        **more,
    )


def test_the_newest_checkpoints_come_first_and_old_ones_are_dropped(
    s3: S3Server, tmp_path: Path
) -> None:
    answers: list[StoreDone] = []
    uploader = Uploader(s3.open(s3.bucket()), answers.append)
    for number in (1, 2, 3):
        uploader.add(work(number, checkpoint(tmp_path, step=number)))
    uploader.end()
    uploader.run()
    assert [answer.number for answer in answers] == [1, 3, 2]
    assert (
        answers[0].dropped and [answer.stored is not None for answer in answers[1:]] == [True] * 2
    )
    assert not list(tmp_path.glob(".store-*"))


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_still_copied(
    s3: S3Server, tmp_path: Path
) -> None:
    answers: list[StoreDone] = []
    store = s3.open(s3.bucket())
    folder = checkpoint(tmp_path)
    uploader = Uploader(store, answers.append)
    uploader.add(work(1, folder))
    expected = contents(folder)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    uploader.end()
    uploader.run()
    assert answers[0].stored is not None
    copies.get(store, answers[0].stored.key, tmp_path / "back")
    assert contents(tmp_path / "back") == expected


def test_a_folder_without_the_right_to_write_has_its_own_hint(tmp_path: Path) -> None:
    store = open_store(url=str(tmp_path))
    problem = explain(PermissionError(errno.EACCES, "Permission denied", "x"), store)
    assert problem.reason == "credentials" and "may not be used" in problem.message
    assert "users of runs" in problem.hint and "ORRERY_STORE_KEY" not in problem.hint
