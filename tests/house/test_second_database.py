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
TESTS = [
    "tests/orchestrator/accounts",  # keys of repeated requests
    "tests/orchestrator/api/test_ingest.py",
    "tests/orchestrator/api/test_runs.py",  # filters and cursors
    "tests/orchestrator/common",
    "tests/orchestrator/config/test_backup.py",
    "tests/orchestrator/dead_letters",
    "tests/orchestrator/fleet",
    "tests/orchestrator/background_jobs",
    "tests/orchestrator/planner/store",
    "tests/orchestrator/runs",
    "tests/orchestrator/scheduling",
    "tests/orchestrator/telemetry",
    "tests/orchestrator/test_admin.py",  # searches and filters
    "tests/webui/test_runs.py",
]
if FULL:
    TESTS = ["tests/orchestrator", "tests/webui"]
# the planner needs a database only for its store
LEFT_OUT = [
    f"--ignore=tests/orchestrator/planner/{path.name}"
    for path in sorted((Path(__file__).resolve().parents[1] / "orchestrator" / "planner").iterdir())
    if path.name not in ("__init__.py", "conftest.py", "store")
]
# pages of the planner, forms and charts compute; a long run's page asks what the lists and REST ask
PURE = [
    "webui/test_planner.py",
    "webui/test_planner_more.py",
    "webui/test_new_run.py",
    "webui/test_engine_charts.py",
]
# settings and the policy never ask a database, a proxied call asks what REST does; signals and
# Redis are the same
PURE += [
    *(
        f"orchestrator/config/test_{name}.py"
        for name in ("embedded", "env", "request_handler", "security")
    ),
    "orchestrator/telemetry/packing",
    "orchestrator/scheduling/test_policy.py",
    "orchestrator/scheduling/test_policy_boundaries.py",
]
PURE += ["orchestrator/api/test_serve.py"]
if not FULL:
    # the planner, nodes' reports and Redis, whose rows others write; a decision kept in memory
    PURE += [
        "orchestrator/common/test_checked_files.py",
        "orchestrator/common/test_stream_groups.py",
        "orchestrator/common/test_streams.py",
        "orchestrator/fleet/test_broker_users.py",
        "orchestrator/runs/test_example_lines.py",
        "orchestrator/runs/test_policy_submit.py",
        "orchestrator/runs/test_predict.py",
        "orchestrator/scheduling/test_engines.py",
        "orchestrator/scheduling/test_node_versions.py",
        "orchestrator/scheduling/test_preflight.py",
        "orchestrator/scheduling/test_slurm_parsing.py",
        "orchestrator/scheduling/test_tick_changes.py",
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
