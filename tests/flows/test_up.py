"""`up` as a person meets it: first start, second start, a kill, a stop that leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.flows.embedded import Orrery, standing_still, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


@pytest.fixture
def orrery(tmp_path: Path) -> Iterator[Orrery]:
    server = Orrery(tmp_path / "home", devices=2)
    yield server
    server.close()


def test_from_start_to_kill_to_start_to_stop_to_start(orrery: Orrery) -> None:
    """One run lives through it: without a server, under another, ended by a stop, and on from where that left it."""
    orrery.start()
    assert "first login: admin / " in orrery.words
    assert httpx.get(f"{orrery.url}/health/", headers={"Accept": "application/json"}).status_code == 200

    second = subprocess.run(orrery.command(), env=orrery.environ, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "already up" in second.stderr and orrery.url in second.stderr

    run = orrery.submit(train_spec(steps=300, every=1000))
    orrery.until_step(run, 30)
    assert orrery.process is not None
    orrery.process.kill()
    orrery.process.wait()
    before = orrery.written(run)
    orrery.until(lambda: orrery.written(run) >= before + 20, 60, "steps without a server")
    with standing_still(orrery.ranks_of(run)):
        orrery.start()
        assert "first login" in orrery.words, "the first password is still the one in the data directory"
        orrery.until_step(run, before + 20)
        assert orrery.state(run) == "running"
    steps = orrery.steps(run)
    assert steps == list(range(1, steps[-1] + 1)), "no step is missing after the kill"

    took = orrery.stop(signal.SIGINT)
    assert took < 10
    assert orrery.processes() == []

    orrery.start()
    orrery.until_state(run, "finished")
    assert orrery.steps(run) == list(range(1, 301))
    attempts = orrery.get(f"runs/{run}/attempts")["items"]
    assert len(attempts) == 2
    restored = [e for e in orrery.get(f"runs/{run}/events", limit=200)["items"] if e["type"] == "checkpoint_restored"]
    assert restored, "the second attempt began at the checkpoint that the stop left"
