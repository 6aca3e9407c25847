"""Launch orders that a node must not obey: who can reach Redis can put anything on its queue, and messages repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.embedded import Orrery, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]


@pytest.fixture
def orrery(tmp_path: Path) -> Iterator[Orrery]:
    server = Orrery(tmp_path / "home", devices=2)
    server.start()
    yield server
    server.close()


SEND = """
import time
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import celery_client, dispatch
from workers.contracts import envelope, wire
from workers.contracts.node import ControlOrder

attempt = Attempt.objects.select_related("run").get(run_id=RUN)
node = Node.objects.get()
secret, now = fleet.node_secret(node), time.time()
again = dispatch.launch_order(attempt, attempt.placement[0], gpu=False).to_dict()
other = {**again, "attempt": 9, "attempt_id": "999", "fence": "f" * 32, "run_dir": f"runs/{RUN}/attempt-9"}
kill = ControlOrder(attempt_id=str(attempt.pk), fence=str(attempt.fence), action="kill", grace_s=0.0).to_dict()


def sealed(body, key=secret, kind=wire.KIND_LAUNCH, at=now):
    return envelope.seal(key, kind, body, ttl_s=60, now=at, node=node.name)


def send(text, task=wire.TASK_LAUNCH):
    celery_client.send(task=task, node=node.name, envelope=text)


twice = sealed(again)
send(twice)
send(twice)
send(sealed(again))
send(sealed(other, key=b"x" * 32))
send(sealed(other, at=now - 3600))
send(sealed(again).replace("/attempt-1", "/attempt-9"))
send(sealed(other, kind=wire.KIND_PROBE))
send("no envelope")
send(sealed(kill, key=b"x" * 32, kind=wire.KIND_CONTROL), wire.TASK_CONTROL)
send(sealed({**other, "run_dir": "../attempt-9"}))
"""


def test_orders_that_repeat_or_lie_start_and_end_nothing(orrery: Orrery) -> None:
    run = orrery.submit(train_spec(steps=300))
    orrery.until_step(run, 20)
    folder = orrery.home / "runs" / run / "attempt-1"
    begun = json.loads((folder / "supervisor.json").read_text())
    log = orrery.home / "logs" / "agent.log"
    before = log.stat().st_size
    orrery.shell(SEND.replace("RUN", run))

    orrery.until(lambda: "is not under runs/" in log.read_text()[before:], 30, "the last order was taken")
    words = log.read_text()[before:]
    refused = ["replayed", "forged", "expired", "forged", "kind", "malformed", "forged"]
    assert re.findall(r"order was refused \((\w+)\)", words) == refused, words
    assert words.count(": launched before") == 2, words  # the same once more, and the same under a new seal
    assert [p.pid for p in orrery.processes() if "workers.launcher" in p.cmdline()] in ([begun["pid"]], [])
    assert orrery.until_state(run, "finished", "failed", "cancelled", "queued") == "finished"
    assert len(orrery.get(f"runs/{run}/attempts")["items"]) == 1
    assert orrery.steps(run) == list(range(1, 301))
    assert json.loads((folder / "supervisor.json").read_text())["pid"] == begun["pid"]
    assert list(orrery.home.parent.rglob("attempt-*")) == [folder]
