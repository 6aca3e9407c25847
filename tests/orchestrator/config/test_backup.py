"""Backups restore every row, key and object, refuse what cannot be restored, and harm nothing."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.conf import settings as django_settings
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from orchestrator.config.backup import databases, objects
from orchestrator.config.env.variables import Env
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run, StoredCopy
from orchestrator.scheduling import celery_client
from tests import factories
from tests.flows.embedded import clean_environ

ROOT = Path(__file__).resolve().parents[3]
REPLACED = pytest.mark.django_db(transaction=True)  # a restore replaces the whole database
# PostgreSQL reads a dump in a transaction of its own
READ = pytest.mark.django_db(transaction=connection.vendor == "postgresql")


@pytest.fixture(autouse=True)
def home(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(celery_client, "send", lambda orders: None)
    settings.ENV = Env(home=tmp_path / "home", secret_key="")
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def rows() -> dict[str, list[dict[str, Any]]]:
    """Every row of every table."""
    return {
        model._meta.label: list(model._default_manager.order_by("pk").values())
        for model in apps.get_models(include_auto_created=True)
        if model._meta.label != "sessions.Session"
    }


def filled() -> Run:
    run = factories.external_run(factories.user("archivist"), name="kept")
    runs.event_record(run=run, type="note", data={"text": "é → 字", "number": 1.5})
    return run


@REPLACED
def test_a_restore_brings_back_every_row(home: Path, tmp_path: Path) -> None:
    (home / "secret_key").write_text("the key of before")
    run = filled()
    before = rows()
    file = tmp_path / "b.tar"
    call_command("backup", str(file))
    assert file.stat().st_mode & 0o777 == 0o600 and not list(tmp_path.glob(".*"))
    run.name = "changed"
    run.save()
    factories.external_run(run.owner, name="later")
    (home / "secret_key").write_text("another")
    call_command("restore", str(file))
    assert rows() == before
    assert (home / "secret_key").read_text() == "the key of before"
    assert (home / "secret_key.before-restore").read_text() == "another"
    new = factories.external_run(run.owner, name="new")  # keys continue behind the restored ones
    assert new.pk not in {row["id"] for row in before["runs.Run"]}


@REPLACED
def test_the_store_is_backed_up_on_request(home: Path, tmp_path: Path, settings: Any) -> None:
    place = tmp_path / "store"
    place.mkdir()
    settings.ENV = Env(home=home, store_url=str(place))
    run = filled()
    key = f"runs/{run.pk}/checkpoints/step-1-abc"
    StoredCopy.objects.create(run=run, kind="checkpoint", key=key, fingerprint="0" * 64)
    (place / key).mkdir(parents=True)
    (place / key / "weights").write_bytes(b"w" * 10)
    call_command("backup", str(tmp_path / "b.tar"), "--artifacts")
    (place / key / "weights").unlink()
    call_command("restore", str(tmp_path / "b.tar"), "--artifacts")
    assert (place / key / "weights").read_bytes() == b"w" * 10


@READ
def test_without_a_store_the_run_folders_are_backed_up(home: Path, tmp_path: Path) -> None:
    folder = home / "runs" / "1" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("w")
    (folder / ".step-1").mkdir()
    (folder / ".step-1" / "unfinished").write_text("u")
    call_command("backup", str(tmp_path / "b.tar"), "--artifacts")
    (folder / "weights").write_text("other")
    with tarfile.open(tmp_path / "b.tar") as saved:
        names = [name for name in saved.getnames() if name.startswith("objects/")]
        assert names == ["objects/runs/1/checkpoints/weights"]
        objects.put(saved, saved.getmember(names[0]), names[0].removeprefix("objects/"))
    assert (folder / "weights").read_text() == "w"


def changed(source: Path, target: Path, **about: Any) -> Path:
    """The archive with another description."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            data = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "backup.json":
                data = json.dumps({**json.loads(data), **about}).encode()
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return target


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (
            {"version": 7, "release": "9.1"},
            "has format 7, this release .* Restore it with release 9.1",
        ),
        ({"database": "oracle"}, "is a backup of oracle, this installation uses"),
        (
            {"migrations": ["runs.9999_later"], "release": "9.1"},
            "runs.9999_later; release .* does not know it. Install release 9.1 or later",
        ),
    ],
)
@READ
def test_backups_of_other_versions_are_refused(
    tmp_path: Path, about: dict[str, Any], message: str
) -> None:
    call_command("backup", str(tmp_path / "b.tar"))
    other = changed(tmp_path / "b.tar", tmp_path / "other.tar", **about)
    with pytest.raises(CommandError, match=message):
        call_command("restore", str(other))


@READ
def test_a_backup_with_accounts_of_a_provider_names_the_setting(
    tmp_path: Path, settings: Any
) -> None:
    call_command("backup", str(tmp_path / "b.tar"))
    other = changed(tmp_path / "b.tar", tmp_path / "o.tar", migrations=["socialaccount.9999_x"])
    settings.ENV = settings.ENV.model_copy(update={"oidc_issuer": ""})
    with pytest.raises(CommandError, match="Set ORRERY_OIDC_ISSUER as where the backup was made"):
        call_command("restore", str(other))


@READ
def test_incomplete_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.tar"
    call_command("backup", str(file))
    with pytest.raises(CommandError, match="was written without --artifacts"):
        call_command("restore", str(file), "--artifacts")
    (tmp_path / "half.tar").write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CommandError, match=r"half\.tar is not a complete backup"):
        call_command("restore", str(tmp_path / "half.tar"))
    with tarfile.open(file) as archive:
        places = [member.offset for member in archive][1:]
    for place in places:  # a file that was cut between two members
        (tmp_path / "half.tar").write_bytes(file.read_bytes()[:place])
        with pytest.raises(CommandError, match=r"half\.tar is not a complete backup"):
            call_command("restore", str(tmp_path / "half.tar"))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CommandError, match="is not a complete backup"):
        call_command("restore", str(tmp_path / "text"))
    with pytest.raises(CommandError, match="does not exist"):
        call_command("restore", str(tmp_path / "missing"))
    with pytest.raises(CommandError, match="create it first"):
        call_command("backup", str(tmp_path / "no" / "folder" / "b.tar"))


@pytest.mark.django_db
def test_a_failed_backup_keeps_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "b.tar"
    file.write_text("previous")

    def full(folder: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(databases, "dump", full)
    with pytest.raises(CommandError, match="No space left"):
        call_command("backup", str(file))
    assert file.read_text() == "previous" and not list(tmp_path.glob(".*"))


@pytest.mark.flow
@pytest.mark.skipif(connection.vendor != "sqlite", reason="copies the tests' database file")
@pytest.mark.django_db
def test_the_runbook_restores_an_installation(tmp_path: Path) -> None:
    """Every command of docs/runbooks/restore.md that is for one machine, in order."""
    text = (ROOT / "docs" / "runbooks" / "restore.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    home = tmp_path / "home"
    environ = {
        **clean_environ(),
        "ORRERY_HOME": str(home),
        "PYTHON": sys.executable,
        "BACKUP": str(tmp_path / "orrery.tar"),
        "ORRERY_OIDC_ISSUER": django_settings.ENV.oidc_issuer,
    }

    def shell(script: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", script], cwd=ROOT, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    home.mkdir(exist_ok=True)
    migrated = sqlite3.connect(f"file:{connection.settings_dict['NAME']}?mode=ro", uri=True)
    fresh = sqlite3.connect(home / "orrery.sqlite3")
    migrated.backup(fresh)
    migrated.close()
    fresh.close()
    shell("$PYTHON manage.py token ann --create")
    saved, restored, checked = blocks
    shell(saved)
    assert "Restored the state of" in shell(restored)
    assert "ann" in shell(checked)
