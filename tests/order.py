"""Order of test files, and which files share one worker, by folder.

Flows wait, start processes and share one installation, so one worker runs them all from the start,
while others compute. Files with one process and many small tests come last and balance the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

GROUP_INPUTS = "tests/flows/"
FIRST = (
    GROUP_INPUTS,
    "tests/house/test_second_database.py",
    "tests/kernels/",
    "tests/workers/launcher/",
    "tests/browser/",
    "tests/workers/training/",
    "tests/workers/",
    "tests/orchestrator/planner/",
)


def place(nodeid: str) -> int:
    """Where a test's file stands; files of one place keep the order that they are given in, which
    is random.
    """
    return next(
        (number for number, folder in enumerate(FIRST) if nodeid.startswith(folder)), len(FIRST)
    )


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    return sorted(items, key=lambda item: place(item.nodeid))


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """xdist's `--dist loadfile` in the order of collection, with the flows as if they were one
    file.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would begin the files of many tests first

    def _split_scope(self, nodeid: str) -> str:
        return (
            GROUP_INPUTS if nodeid.startswith(GROUP_INPUTS) else str(super()._split_scope(nodeid))
        )
