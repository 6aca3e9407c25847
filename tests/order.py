"""Order of test files, and which files share one worker, by folder.

Flows wait, start processes and share one installation, so one worker runs them all from the start,
while others compute. Files with one process and many small tests come last and balance the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

FLOWS = "tests/flows/"
FIRST = (
    FLOWS,
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


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """xdist's `--dist loadfile` in order of collection; all flows count as one file."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # do not start with the largest files

    def _split_scope(self, nodeid: str) -> str:
        return FLOWS if nodeid.startswith(FLOWS) else str(super()._split_scope(nodeid))
