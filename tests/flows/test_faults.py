"""`kill -9` in the middle of a run, one part at a time: nothing starts twice, no point is lost or doubled, all is explained."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.embedded import Orrery, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def orrery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orrery]:
    server = Orrery(tmp_path_factory.mktemp("faults") / "home", devices=2)
    server.start()
    yield server
    server.close()


def folder(orrery: Orrery, run: str, attempt: int = 1) -> Path:
    return orrery.home / "runs" / run / f"attempt-{attempt}"


def attempts(orrery: Orrery, run: str) -> list[dict[str, Any]]:
    return sorted(orrery.get(f"runs/{run}/attempts")["items"], key=lambda attempt: attempt["attempt"])


def explained(orrery: Orrery, run: str) -> list[str]:
    events = orrery.get(f"runs/{run}/events", limit=200)["items"]
    return [str(event["data"].get("why", "")) for event in events if event["type"] == "state_changed"]


def whole(orrery: Orrery, run: str, steps: int) -> None:
    """Every rank has every step once, in the store as on disk."""
    for rank in (0, 1):
        assert orrery.steps(run, rank=rank) == list(range(1, steps + 1)), f"rank {rank}"


@pytest.mark.parametrize("part", ["web", "scheduler", "ingest", "agent", "valkey"])
def test_a_killed_part_delays_a_run_and_nothing_else(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=200, every=50), name=f"kill {part}")
    orrery.until_step(run, 20)
    if part == "valkey":
        time.sleep(1.1)  # its file is synced every second; what is younger is sent again
    os.kill(orrery.pid_of(part), signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled", "queued") == "finished", explained(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts(orrery, run)] == ["ok"]
    whole(orrery, run, 200)
    points = [line for line in (folder(orrery, run) / "rank-0" / "points.jsonl").read_text().splitlines() if line]
    assert len(points) == 200, "the attempt started once"


@pytest.mark.parametrize("part", ["supervisor", "rank"])
def test_a_killed_attempt_goes_on_from_its_checkpoint(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=200, every=20), name=f"kill {part}")
    orrery.until_step(run, 45)
    path = folder(orrery, run) / ("supervisor.json" if part == "supervisor" else "rank-1/process.json")
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
    assert orrery.until_state(run, "finished", "failed", "cancelled") == "finished", explained(orrery, run)
    first, second = attempts(orrery, run)
    assert (first["exit_class"], second["exit_class"]) == ("infrastructure", "ok")
    assert ("SIGKILL" if part == "rank" else "supervisor") in first["exit"]["reason"]
    assert second["resume_from"]["step"] >= 40
    assert any("retry 1 of 5" in why for why in explained(orrery, run))
    whole(orrery, run, 200)


def test_a_full_disk_ends_the_attempt_with_a_clear_reason(orrery: Orrery) -> None:
    """A folder that cannot be made stands for a disk that cannot be written: tests may run as root."""
    number = int(orrery.submit(train_spec(steps=1), name="counter")) + 1
    (orrery.home / "runs").mkdir(exist_ok=True)
    (orrery.home / "runs" / str(number)).write_text("a file where the run's folder should be")
    run = orrery.submit(train_spec(steps=5, retries={"infrastructure": 0}), name="no room")
    assert run == str(number)
    assert orrery.until_state(run, "failed", "finished") == "failed"
    told = orrery.get(f"runs/{run}")["exit"]
    assert told["class"] == "infrastructure" and "cannot be used" in told["reason"]
