"""The database tests once more on PostgreSQL: the same code must hold on both.

`make test` runs the tests of what can differ between databases: locks, conditional updates, JSON,
bulk queries, cursors of lists, migrations. ORRERY_TEST_MATRIX=full adds all tests that use one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.stack import postgresql, postgresql_programs
from tests.matrix import FULL

ROOT = Path(__file__).resolve().parents[2]
# by folder of tests/orchestrator: the files whose subject can differ between databases
FILES = {
    "accounts": ["idempotency", "teams"],
    "api": ["ingest", "runs"],
    "background_jobs": [
        "exports",
        "frequent",
        "garbage",
        "notifications",
        "retention",
        "retention_of_telemetry",
        "running",
        "slow_devices",
        "usage",
    ],
    "common": ["common", "live"],
    "config": ["backup"],
    "dead_letters": ["dead_letters"],
    "fleet": ["fleet"],
    "planner/store": ["services"],
    "reviews": ["comparisons"],
    "run_table": ["table"],
    "runs": [
        "actions",
        "attempts",
        "events",
        "lineage",
        "lists",
        "races",
        "run_rows",
        "samples",
        "states",
        "store",
        "store_races",
    ],
    "scheduling": [
        "delivery",
        "device_time",
        "heartbeats",
        "silence",
        "loop",
        "node_removal",
        "preemption",
        "periodic_checks",
        "reports",
        "state_machine",
        "tick",
    ],
    "telemetry": ["ingest", "ingest_loop", "logs", "outcome", "points", "rewind", "summaries"],
}
TESTS = [
    f"tests/orchestrator/{folder}/test_{name}.py"
    for folder, names in FILES.items()
    for name in names
]
TESTS.append("tests/orchestrator/test_admin.py")  # searches and filters
if FULL:
    TESTS = ["tests/orchestrator", "tests/webui"]
# of the full list: the planner needs a database only for its store
LEFT_OUT = [
    f"--ignore=tests/orchestrator/planner/{path.name}"
    for path in sorted((Path(__file__).resolve().parents[1] / "orchestrator" / "planner").iterdir())
    if path.name not in ("__init__.py", "conftest.py", "store")
]
# pages of the planner, forms and charts compute; settings and the policy never ask a database, a
# proxied call asks what REST does; signals and Redis are the same
PURE = [
    "webui/test_planner.py",
    "webui/test_planner_more.py",
    "webui/test_new_run.py",
    "webui/test_engine_charts.py",
    *(
        f"orchestrator/config/test_{name}.py"
        for name in ("embedded", "env", "request_handler", "security")
    ),
    "orchestrator/telemetry/packing",
    "orchestrator/scheduling/test_policy.py",
    "orchestrator/scheduling/test_policy_boundaries.py",
    "orchestrator/api/test_serve.py",
]
LEFT_OUT += [f"--ignore=tests/{name}" for name in PURE]
LEFT_OUT += ["-k", "not (costs_few_queries or sigterm or killed_server or redis_may_die)"]


@pytest.fixture
def postgres() -> Iterator[str]:
    if postgresql_programs() is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed; tools/system.py installs it")
        pytest.skip("PostgreSQL is not installed here, so the second database is left out")
    with postgresql(durable=False) as url:
        yield url


@pytest.mark.timeout(900)
def test_database_tests_pass_on_postgresql(postgres: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", *LEFT_OUT, *TESTS]
    environ = {**os.environ, "DATABASE_URL": postgres}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
