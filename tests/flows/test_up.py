"""`manage.py up`: first start, second start, a kill, and a stop that leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.flows.embedded import Orrery, train_spec
from tests.flows.gate import submitted

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


@pytest.fixture
def orrery(tmp_path: Path) -> Iterator[Orrery]:
    server = Orrery(tmp_path / "home", devices=2)
    yield server
    server.close()


def test_from_start_to_kill_to_start_to_stop_to_start(orrery: Orrery) -> None:
    """One run lives through it: without a server, under another, ended by a stop, and on from where
    that left it.
    """
    orrery.start()
    assert "first login: admin / " in orrery.words
    assert (
        httpx.get(f"{orrery.url}/health/", headers={"Accept": "application/json"}).status_code
        == 200
    )

    second = subprocess.run(
        orrery.command(), env=orrery.environ, capture_output=True, text=True, timeout=180
    )
    assert second.returncode == 1
    assert "already up" in second.stderr and orrery.url in second.stderr

    with submitted(orrery, train_spec(steps=100, every=1000)) as (run, gate):
        orrery.until_step(run, gate.to(30))
        assert orrery.process is not None
        orrery.process.kill()
        orrery.process.wait()
        step = gate.to(50)  # without a server
        orrery.start()
        assert "first login" in orrery.words, (
            "the first password is still the one in the data directory"
        )
        orrery.until_step(run, step)
        assert orrery.state(run) == "running"
        assert orrery.steps(run) == list(range(1, step + 1)), "no step is missing after the kill"
        orrery.stop(signal.SIGINT)
    assert orrery.processes() == []

    orrery.start()
    orrery.until_state(run, "finished")
    orrery.until_reported(run)
    assert orrery.steps(run) == list(range(1, 101))
    attempts = orrery.get(f"runs/{run}/attempts")["items"]
    assert len(attempts) == 2
    [restored] = orrery.events(run, "checkpoint_restored")
    assert restored["data"]["step"] >= step, (
        "the second attempt began at the checkpoint that the stop left"
    )
