"""Long-running processes exclude what they have loaded from garbage collection."""

from __future__ import annotations

import gc
import signal
from types import ModuleType
from typing import Any

import pytest

from orchestrator.background_jobs.management.commands import jobs
from orchestrator.common.processes import garbage_collection
from orchestrator.scheduling.management.commands import scheduler
from orchestrator.telemetry.management.commands import ingest


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
    before = gc.get_freeze_count()
    retained = [[] for _ in range(1000)]
    garbage_collection.exclude_loaded_objects()
    assert gc.get_freeze_count() >= before + len(retained)
