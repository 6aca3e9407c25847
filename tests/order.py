"""Which files of tests begin first, and which belong on one worker. Knows folders, not tests.

Whole paths (flows) wait, start processes and share one installation: one worker takes them all,
from the beginning on,
and what computes runs beside them. Files of one process and many small tests come last, where they
even out the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TOGETHER = "tests/flows/"
FIRST = (
    TOGETHER,
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
        return TOGETHER if nodeid.startswith(TOGETHER) else str(super()._split_scope(nodeid))
