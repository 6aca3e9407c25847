"""Restricts the data directory and a SQLite database to this user (modes 700 and 600).

Also repairs installations of earlier versions, at every start. Does not depend on Django's apps.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path
from typing import Any

from django.conf import settings

log = logging.getLogger(__name__)

_DATABASE_SUFFIXES = ("", "-wal", "-shm", "-journal")


# what runs under another user may enter, if the home lets them pass
_OPEN = frozenset({"runs", "users", "data", "models"})


def restrict(home: Path, database: Path | None, *, passable: bool = False) -> None:
    """Remove the rights of group and others on existing files. Missing ones are skipped.

    `passable`: others may pass through the home to folders of runs, but see none of its names.
    """
    if passable and home.is_dir():
        for entry in home.iterdir():
            if entry.name not in _OPEN and not entry.is_symlink():
                _restrict(entry, 0o700)
    _restrict(home, 0o711 if passable else 0o700)
    if database is not None:
        for suffix in _DATABASE_SUFFIXES:
            _restrict(database.with_name(database.name + suffix), 0o600)


def restrict_new_database(sender: object, connection: Any, **_: object) -> None:
    """Restrict a SQLite file that a first connection created; its other files inherit the mode."""
    if connection.vendor == "sqlite":
        _restrict(Path(connection.settings_dict["NAME"]), 0o600)


def database_file() -> Path | None:
    """The file of a SQLite database."""
    database = settings.DATABASES["default"]
    if not database["ENGINE"].endswith("sqlite3"):
        return None
    return Path(database["NAME"])


def _restrict(path: Path, mode: int) -> None:
    try:
        current = stat.S_IMODE(path.stat().st_mode)
        if current & ~mode & 0o777:
            path.chmod(current & mode)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning(
            "%s is open to other users of this machine: %s. Run chmod %o.", path, error, mode
        )
