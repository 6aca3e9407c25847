"""Which tests start ranks, a browser, real processes or Triton's interpreter, or compute for long.

`make test-quick` leaves the marked tests out; `make test` and `make test-all` run all of them.
"""

from __future__ import annotations

import pytest

# folder or file -> marker
BY_PATH = {
    "tests/flows/": "flow",
    "tests/chaos/": "flow",
    "tests/browser/": "browser",
    "tests/house/test_second_database.py": "flow",
    "tests/kernels/test_interpreted.py": "interpreter",
    "tests/kernels/test_gate.py": "interpreter",
    "tests/examples/": "ranks",
    "tests/workers/launcher/": "ranks",
    "tests/workers/inference/test_parallel.py": "ranks",
    "tests/workers/training/test_main.py": "ranks",
    "tests/orchestrator/planner/model/memory/test_model_states.py::test_tensor_parallel": "ranks",
    "tests/orchestrator/planner/model/communication/test_collective_calls.py": "ranks",
    "tests/orchestrator/planner/model/activations/test_blocks.py": "slow",
    "tests/orchestrator/planner/model/activations/test_stage.py": "slow",
    "tests/orchestrator/planner/model/memory/test_model_states.py": "slow",
    "tests/orchestrator/planner/model/memory/test_adapted.py": "slow",
    "tests/orchestrator/planner/model/memory/test_peak.py": "slow",
    "tests/orchestrator/planner/search/test_rank_plans.py": "slow",
    "tests/orchestrator/api/test_access_matrix.py::test_rest": "slow",
    "tests/orchestrator/api/test_access_matrix.py::test_pages": "slow",
    "tests/orchestrator/api/test_malformed_requests.py": "slow",
    "tests/orchestrator/fuzz/": "slow",
    "tests/orchestrator/test_upgrade_migrations.py": "slow",
    "tests/kernels/test_gpu_run.py": "slow",
    "tests/workers/inference/test_speculate.py": "slow",
    "tests/workers/inference/test_transformers.py": "slow",
    "tests/workers/training/test_compiled.py": "interpreter",
}
# a test that requests this fixture -> marker
BY_FIXTURE = {"pools": "ranks", "eight": "ranks", "three_ranks": "ranks"}


def mark(item: pytest.Item) -> None:
    """Adds the markers of its path and of its fixtures to a test."""
    names = {name for path, name in BY_PATH.items() if item.nodeid.startswith(path)}
    fixtures = getattr(item, "fixturenames", ())
    names |= {name for fixture, name in BY_FIXTURE.items() if fixture in fixtures}
    for name in sorted(names):
        item.add_marker(name)
