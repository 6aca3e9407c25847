"""Which tests start ranks, a browser, real processes or Triton's interpreter: a marker for each.

`make test-quick` leaves the marked tests out; `make test` and `make test-all` run all of them.
"""

from __future__ import annotations

import pytest

# folder or file -> marker
BY_PATH = {
    "tests/flows/": "flow",
    "tests/browser/": "browser",
    "tests/house/test_second_database.py": "flow",
    "tests/kernels/test_interpreted.py": "interpreter",
    "tests/kernels/test_gate.py": "interpreter",
    "tests/examples/": "ranks",
    "tests/workers/launcher/": "ranks",
    "tests/workers/inference/test_parallel.py": "ranks",
    "tests/orchestrator/planner/model/communication/test_engine_traffic.py": "ranks",
}
# a test that requests this fixture -> marker
BY_FIXTURE = {"pools": "ranks"}


def mark(item: pytest.Item) -> None:
    """Adds the markers of its path and of its fixtures to a test."""
    names = {name for path, name in BY_PATH.items() if item.nodeid.startswith(path)}
    fixtures = getattr(item, "fixturenames", ())
    names |= {name for fixture, name in BY_FIXTURE.items() if fixture in fixtures}
    for name in sorted(names):
        item.add_marker(name)
