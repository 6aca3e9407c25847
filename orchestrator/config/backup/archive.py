"""The archive of a backup: a tar file with a description first, then the database, then objects.

`write` and `read` work on the running installation. Does not know how a database is copied.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.db import connection

from orchestrator.common import clock
from orchestrator.config.backup import databases, objects
from workers.contracts.wire import versions

VERSION: Final = 1
_OF_LOGIN: Final = ("account.", "socialaccount.")  # loaded only with an identity provider
_ABOUT: Final = "backup.json"
_DATABASE: Final = "database/"
_OBJECTS: Final = "objects/"
_KEY: Final = "secret_key"


class BackupRefused(Exception):
    """The backup or restore cannot be done; the message says why and what to do."""


def write(target: Path, *, artifacts: bool) -> dict[str, Any]:
    """Write the archive (mode 600) while the installation runs; returns its description.

    The database is read in one transaction. Raises BackupRefused and OSError.
    """
    if not target.parent.is_dir():
        raise BackupRefused(f"The folder {target.parent} does not exist; create it first.")
    temporary = target.with_name(f".{target.name}.part")
    about: dict[str, Any] = {
        "version": VERSION,
        "release": versions.RELEASE,
        "created": clock.now().isoformat(),
        "database": connection.vendor,
        "artifacts": artifacts,
    }
    try:
        with (
            open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w") as archive,
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".orrery-backup-") as folder,
        ):
            about["migrations"], parts = databases.dump(Path(folder))
            _add_text(archive, _ABOUT, json.dumps(about, indent=1))
            for name, path in parts:
                archive.add(path, f"{_DATABASE}{name}")
            key = settings.ENV.home / _KEY
            if not settings.ENV.secret_key and key.exists():
                _add_text(archive, _KEY, key.read_text())
            if artifacts:
                about["objects"] = objects.add_all(archive, _OBJECTS)
            archive.close()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return about


def describe(source: Path) -> dict[str, Any]:
    """The description of an archive. Raises BackupRefused if it is not one that can be restored."""
    with _opened(source) as archive:
        about = _about(archive, source)
    if about.get("version") != VERSION:
        raise BackupRefused(
            f"{source} has format {about.get('version')}, this release ({versions.RELEASE}) reads "
            f"{VERSION}. Restore it with release {about.get('release', 'unknown')}, then upgrade "
            f"({versions.DOCUMENT})."
        )
    if about["database"] != connection.vendor:
        raise BackupRefused(
            f"{source} is a backup of {about['database']}, this installation uses "
            f"{connection.vendor}. Set DATABASE_URL for {about['database']}, or unset it for "
            "sqlite, and restore there."
        )
    known = {f"{app}.{name}" for app, name in databases.known_migrations()}
    unknown = sorted(set(about["migrations"]) - known)
    if any(name.startswith(_OF_LOGIN) for name in unknown) and not settings.ENV.oidc_issuer:
        raise BackupRefused(
            f"{source} has accounts of an identity provider, which this installation does not use. "
            "Set ORRERY_OIDC_ISSUER as where the backup was made, and restore again."
        )
    if unknown:
        raise BackupRefused(
            f"{source} was written by release {about['release']}, whose database has "
            f"{unknown[0]}; release {versions.RELEASE} does not know it. Install release "
            f"{about['release']} or later and restore again."
        )
    return about


def read(source: Path, *, artifacts: bool) -> dict[str, Any]:
    """Replace the database, the key and, with `artifacts`, objects by those of the archive.

    Nothing else may use the database. Raises BackupRefused and OSError; a database that could not
    be restored is as before.
    """
    about = describe(source)
    if artifacts and not about.get("artifacts"):
        raise BackupRefused(
            f"{source} has no artifacts; it was written without --artifacts. Restore it without "
            "that option."
        )
    with tempfile.TemporaryDirectory(prefix="orrery-restore-") as name:
        folder = Path(name)
        with _opened(source) as archive:
            key = None
            for member in archive:
                if member.name.startswith(_DATABASE) and member.isfile():
                    _extract(archive, member, folder / Path(member.name).name)
                elif member.name == _KEY:
                    key = _text(archive, member)
                elif member.name.startswith(_OBJECTS) and artifacts and member.isfile():
                    objects.put(archive, member, member.name.removeprefix(_OBJECTS))
            _require_end(archive, source)
        try:
            databases.load(folder, migrations=about["migrations"])
        except databases.NotRestored as error:
            raise BackupRefused(f"{source}: {error}") from None
    if key is not None:
        _restore_key(key)
    return about


def _restore_key(text: str) -> None:
    """Put the key in place that node secrets and encrypted texts depend on; keep another one."""
    path = settings.ENV.home / _KEY
    if path.exists() and path.read_text() != text:
        shutil.move(path, path.with_name(f"{_KEY}.before-restore"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _require_end(archive: tarfile.TarFile, source: Path) -> None:
    """Raise BackupRefused without the zeros that end an archive: tarfile accepts a file that was
    cut between two members.
    """
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise BackupRefused(f"{source} is not a complete backup: its end is missing.")


@contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, mode="r:") as archive:
            yield archive
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise BackupRefused(f"{source} is not a complete backup: {error}.") from None
    except FileNotFoundError:
        raise BackupRefused(f"{source} does not exist.") from None


def _about(archive: tarfile.TarFile, source: Path) -> dict[str, Any]:
    member = archive.next()
    if member is None or member.name != _ABOUT:
        raise BackupRefused(
            f"{source} is not a backup of Orrery; `manage.py backup FILE` writes one."
        )
    about: dict[str, Any] = json.loads(_text(archive, member))
    return about


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    assert file is not None
    return file.read().decode()


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    file = archive.extractfile(member)
    assert file is not None
    with open(target, "wb") as out:
        shutil.copyfileobj(file, out, 1 << 20)


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o600, int(clock.now().timestamp())
    archive.addfile(info, io.BytesIO(data))
