"""Long-running processes exclude what they have loaded from garbage collection."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from orchestrator.background_jobs.management.commands import jobs
from orchestrator.scheduling.management.commands import scheduler
from orchestrator.telemetry.management.commands import ingest

EXCLUDE = """
import gc
from orchestrator.common.processes.garbage_collection import exclude_loaded_objects
before = gc.get_freeze_count()
loaded = [[] for _ in range(1000)]
exclude_loaded_objects()
assert gc.get_freeze_count() >= before + len(loaded)
"""


@pytest.mark.parametrize(
    ("command", "work"),
    [(scheduler, "Loop"), (ingest, "Ingest"), (jobs, "worker")],
    ids=["scheduler", "ingest", "jobs"],
)
def test_loaded_objects_are_excluded_before_the_work_starts(
    command: ModuleType, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Work:
        name, ticks = "work", 0

        def __init__(self, **_: Any) -> None:
            pass

        def run(self) -> None:
            calls.append("run")

    monkeypatch.setattr(command, work, Work if work != "worker" else Work())
    monkeypatch.setattr(command, "exclude_loaded_objects", lambda: calls.append("exclude"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command.Command().handle()
    assert calls == ["exclude", "run"]


def test_excluded_objects_are_not_searched() -> None:
    """In a process of its own: this one's objects stay as `tests/conftest.py` left them."""
    frozen = gc.get_freeze_count()
    done = subprocess.run([sys.executable, "-c", EXCLUDE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert gc.get_freeze_count() == frozen
