"""Copies the database into files and back: SQLite by its online backup, PostgreSQL by COPY.

A dump is one consistent state while others write. A load is complete or leaves the database as it
was. Does not depend on the archive.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any, Final

from django.apps import apps
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

_SQLITE: Final = "sqlite.gz"
_TABLES: Final = "tables.json"
_LEVEL: Final = 1  # of compression: half the size at 100 MB/s


class NotRestored(Exception):
    """The database was not restored; the message says why and what to do."""


def dump(folder: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    """Write the database into files of the folder: `(migrations, [(name, path)])`."""
    return _dump_sqlite(folder) if connection.vendor == "sqlite" else _dump_postgresql(folder)


def load(folder: Path, *, migrations: list[str]) -> None:
    """Replace the database by the files of `dump`, then apply migrations that are newer.

    Raises NotRestored if others use it or its files are incomplete.
    """
    if connection.vendor == "sqlite":
        _load_sqlite(folder)
        call_command("migrate", verbosity=0)
    else:
        _load_postgresql(folder, migrations)


def known_migrations() -> set[tuple[str, str]]:
    """The migrations of this release, `{(app, name)}`."""
    return set(MigrationLoader(None).disk_migrations)


def _applied() -> list[str]:
    rows = MigrationRecorder(connection).applied_migrations()
    return sorted(f"{app}.{name}" for app, name in rows)


def _dump_sqlite(folder: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    plain, packed = folder / "copy.sqlite3", folder / _SQLITE
    source = sqlite3.connect(f"file:{connection.settings_dict['NAME']}?mode=ro", uri=True)
    target = sqlite3.connect(plain)
    try:
        source.backup(target)
        rows = target.execute("SELECT app, name FROM django_migrations").fetchall()
    finally:
        source.close()
        target.close()
    with open(plain, "rb") as file, gzip.open(packed, "wb", compresslevel=_LEVEL) as out:
        shutil.copyfileobj(file, out, 1 << 20)
    plain.unlink()
    return sorted(f"{app}.{name}" for app, name in rows), [(_SQLITE, packed)]


def _load_sqlite(folder: Path) -> None:
    plain = folder / "copy.sqlite3"
    try:
        with gzip.open(folder / _SQLITE, "rb") as file, open(plain, "wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
    except (OSError, EOFError) as error:
        raise NotRestored(f"its database cannot be read: {error}.") from None
    connection.close()
    source = sqlite3.connect(plain)
    target = sqlite3.connect(connection.settings_dict["NAME"], timeout=5)
    try:
        if source.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise NotRestored("its database is damaged; restore an older backup.")
        source.backup(target)
    except sqlite3.OperationalError as error:
        raise NotRestored(
            f"the database is in use ({error}); stop every process of this installation first."
        ) from None
    finally:
        source.close()
        target.close()


def _tables() -> dict[str, list[str]]:
    """Columns by table, without the record of migrations, which must be equal."""
    with connection.cursor() as cursor:
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        describe = connection.introspection.get_table_description
        return {
            name: [column.name for column in describe(cursor, name)]
            for name in sorted(names)
            if name != "django_migrations"
        }


def _copy(table: str, columns: list[str], direction: str) -> str:
    quote = connection.ops.quote_name
    listed = ", ".join(quote(name) for name in columns)
    return f"COPY {quote(table)} ({listed}) {direction} (FORMAT binary)"


def _dump_postgresql(folder: Path) -> tuple[list[str], list[tuple[str, Path]]]:
    parts: list[tuple[str, Path]] = []
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        tables, migrations = _tables(), _applied()
        (folder / _TABLES).write_text(json.dumps(tables))
        parts.append((_TABLES, folder / _TABLES))
        for number, (table, columns) in enumerate(tables.items()):
            path = folder / f"table-{number}.gz"
            with (
                gzip.open(path, "wb", compresslevel=_LEVEL) as out,
                _raw_cursor() as cursor,
                cursor.copy(_copy(table, columns, "TO STDOUT")) as rows,
            ):
                for data in rows:
                    out.write(data)
            parts.append((path.name, path))
    return migrations, parts


def _load_postgresql(folder: Path, migrations: list[str]) -> None:
    call_command("migrate", verbosity=0)
    if missing := sorted(set(_applied()) - set(migrations)):
        raise NotRestored(
            f"it is from before {missing[0]}. Restore it with the release that wrote it, then "
            "upgrade (docs/upgrading.md)."
        )
    tables: dict[str, list[str]] = json.loads((folder / _TABLES).read_text())
    with transaction.atomic():
        _refuse_others()
        quote = connection.ops.quote_name
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {', '.join(quote(name) for name in _tables())}")
        for number, (table, columns) in enumerate(tables.items()):
            try:
                with (
                    gzip.open(folder / f"table-{number}.gz", "rb") as file,
                    _raw_cursor() as cursor,
                    cursor.copy(_copy(table, columns, "FROM STDIN")) as rows,
                ):
                    while data := file.read(1 << 20):
                        rows.write(data)
            except (OSError, EOFError) as error:
                raise NotRestored(f"its table {table} cannot be read: {error}.") from None
        models = [model for model in apps.get_models(include_auto_created=True)]
        with connection.cursor() as cursor:
            for statement in connection.ops.sequence_reset_sql(no_style(), models):
                cursor.execute(statement)


def _refuse_others() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        others = cursor.fetchone()[0]
    if others:
        raise NotRestored(
            f"{others} other connections use the database; stop every process of this "
            "installation first."
        )


def _raw_cursor() -> Any:
    """A cursor of psycopg, which has `copy`."""
    connection.ensure_connection()
    return connection.connection.cursor()
