"""Migrations since the previous release only expand, and the documented way back restores it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connection

from tests.flows.embedded import clean_environ
from tests.workers.contracts.previous_release import FOLDER

ROOT = Path(__file__).resolve().parents[2]
TABLES: dict[str, list[str]] = json.loads((FOLDER / "tables.json").read_text())
# removed since then; docs/upgrading.md says why programs of that release must be stopped
REMOVED = {("runs_attempt", "nodes_exited")}
BACK = """
import json
import django
django.setup()
from django.core.management import call_command
from django.db import connection
def columns():
    with connection.cursor() as cursor:
        names = connection.introspection.table_names(cursor)
        describe = connection.introspection.get_table_description
        return {name: [row.name for row in describe(cursor, name)] for name in names}
call_command("migrate", verbosity=0)
newest = columns()
for app, name in COMMANDS:
    call_command("migrate", app, name, verbosity=0)
old = columns()
call_command("migrate", verbosity=0)
print(json.dumps({"old": old, "again": columns() == newest}))
"""


@pytest.mark.django_db
def test_programs_of_the_previous_release_can_still_insert_rows() -> None:
    problems, removed = [], set()
    with connection.cursor() as cursor:
        for table, known in TABLES.items():
            columns = connection.introspection.get_table_description(cursor, table)
            removed |= {(table, name) for name in set(known) - {row.name for row in columns}}
            problems += [
                f"{table}.{row.name}: add null=True or db_default to the field"
                for row in columns
                if row.name not in known and not row.null_ok and row.default is None
            ]
    assert not problems, problems
    assert removed == REMOVED, "a later release removes columns; see docs/upgrading.md"


def test_the_documented_rollback_restores_the_tables(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "upgrading.md").read_text().partition("## Rollback")[2]
    commands = re.findall(r"`manage\.py migrate (\w+) (\w+)`", text)
    assert len(commands) >= 3
    done = subprocess.run(
        [sys.executable, "-c", BACK.replace("COMMANDS", repr(commands))],
        cwd=ROOT,
        env={
            **clean_environ(),
            "ORRERY_HOME": str(tmp_path),
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings",
            "PATH": os.environ["PATH"],
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    differing = {
        table: sorted(set(names) ^ set(result["old"].get(table, [])))
        for table, names in TABLES.items()
        if set(names) != set(result["old"].get(table, []))
    }
    assert not differing and result["again"]
