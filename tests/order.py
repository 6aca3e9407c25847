"""Number of test processes, order of test files, and which files share one process.

Flows mostly wait for processes, so two test processes run them from the start, each with one
installation, while another one computes. Small files come last and balance the end.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

FLOWS = "tests/flows/"
# these share the first installation; the others share the second, or start their own
FIRST_FLOWS = tuple(
    f"{FLOWS}test_{name}.py" for name in ("tolerance", "answering", "foreign", "orders")
)
FIRST = (
    *FIRST_FLOWS[:1],
    FLOWS,
    "tests/chaos/",
    "tests/house/test_second_database.py",
    "tests/kernels/",
    "tests/workers/launcher/",
    "tests/browser/",
    "tests/workers/training/",
    "tests/workers/",
    "tests/orchestrator/planner/",
)


def place(nodeid: str) -> int:
    """Position of a test's file. Files with the same position keep their order, which is random."""
    return next(
        (number for number, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST)
    )


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests sorted by position."""
    return sorted(items, key=lambda item: place(item.nodeid))


def processes() -> int:
    """Test processes for `-n auto`: one more than cores, because some wait; at most 4."""
    return min(4, (os.cpu_count() or 1) + 1)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """xdist's `--dist loadfile` in order of collection; flows count as two files."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # do not start with the largest files

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(FLOWS):
            return FIRST_FLOWS[0] if nodeid.startswith(FIRST_FLOWS) else FLOWS
        return str(super()._split_scope(nodeid))
