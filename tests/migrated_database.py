"""What a first start writes, created once per session: an SQLite database with all migrations
(seven CPU seconds), and compressed scripts and styles (0.7).

Other test processes and installations that tests start copy it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from webui.bundling.finder import written_below

NAME = "orrery.sqlite3"  # in the data directory of an installation
BUNDLES = "bundles"


@pytest.fixture(scope="session")
def migrated_database(
    tmp_path_factory: pytest.TempPathFactory, django_test_environment: None, django_db_blocker: Any
) -> Path:
    """The file to copy (`install`); nothing may write to it."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # that of all test processes
    path, part = folder / NAME, folder / f"{NAME}.part"
    with open(folder / f"{NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part.unlink(missing_ok=True)
            with django_db_blocker.unblock():
                _migrate(part)
            written_below(folder / BUNDLES)
            part.rename(path)
    return path


def install(database: Path, home: Path) -> None:
    """Copy `database`, and scripts and styles, into the data directory `home`, which need not
    exist.
    """
    home.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(database, home / NAME)
    (home / NAME).chmod(0o600)
    if (database.parent / BUNDLES).is_dir():
        shutil.copytree(database.parent / BUNDLES, home / BUNDLES, dirs_exist_ok=True)


def _migrate(path: Path) -> None:
    from django.core.management import call_command
    from django.db import connection

    connection.close()
    usual, connection.settings_dict["NAME"] = connection.settings_dict["NAME"], str(path)
    try:
        call_command("migrate", verbosity=0)
        connection.close()
    finally:
        connection.settings_dict["NAME"] = usual
