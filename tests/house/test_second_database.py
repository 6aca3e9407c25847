"""The database tests once more on PostgreSQL: the same code must hold on both.

`make test` runs the tests of what can differ between databases, and all migrations.
ORRERY_TEST_MATRIX=full adds all tests that use a database.
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
# what can differ between databases, and the files of tests/orchestrator that depend on it
FILES = {
    "locks of rows, transactions at the same time, violated constraints": [
        "accounts/test_idempotency.py",
        "common/test_common.py",
        "common/test_live.py",
        "reviews/test_comparisons.py",
        "runs/test_actions.py",
        "runs/test_attempts.py",
        "runs/test_events.py",
        "runs/test_races.py",
        "runs/test_states.py",
        "runs/test_store_races.py",
        "scheduling/test_guarantees.py",
        "scheduling/test_loop.py",
        "scheduling/test_periodic_checks.py",
        "scheduling/test_preemption.py",
        "scheduling/test_windows.py",
        "tracking/test_tracking.py",
    ],
    "SQL of our own, statements for one database": [
        "config/test_backup.py",
        "device_history/test_recording.py",
        "fleet/test_fleet.py",
        "scheduling/test_heartbeats.py",
        "scheduling/test_reports.py",
        "scheduling/test_tick.py",
    ],
    "rows that are inserted or updated, and conflicts that are ignored": [
        "background_jobs/test_garbage.py",
        "background_jobs/test_notifications.py",
        "runs/test_run_rows.py",
        "telemetry/test_ingest.py",
        "telemetry/test_rewind.py",
        "telemetry/test_summaries.py",
    ],
    "JSON, casts, sums and dates in queries": [
        "background_jobs/test_usage.py::test_usage_by_experiment_and_month_with_its_cost",
        "run_table/test_table.py",
        "runs/test_lineage.py",
        "runs/test_samples.py",
        "scheduling/test_device_time.py",
        "scheduling/test_produce_servers.py",
    ],
    "order of rows, cursors of lists, search": [
        "api/test_runs.py",
        "background_jobs/test_exports.py",
        "runs/test_lists.py",
        "test_admin.py",
    ],
    "texts and numbers that a column cannot store": [
        "api/test_ingest.py",
        "telemetry/test_logs.py",
        "telemetry/test_points.py",
    ],
    "deletion of many rows": [
        "background_jobs/test_frequent.py",
        "background_jobs/test_retention.py",
        "background_jobs/test_retention_of_telemetry.py",
        "background_jobs/test_running.py",
        "scheduling/test_node_removal.py",
    ],
}
TESTS = [f"tests/orchestrator/{name}" for names in FILES.values() for name in names]
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
