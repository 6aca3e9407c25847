"""Launch orders that a node must refuse: forged or repeated messages on its queue."""

from __future__ import annotations

import json
import re

import pytest

from tests.flows.embedded import Orrery, words_of

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]


PROGRAM = """
import pathlib, time
import orrery_recorder

run = orrery_recorder.init()
step = 0
while not pathlib.Path("stop").exists():
    step += 1
    run.log({"loss": 1 / step}, step=step)
    time.sleep(0.02)
run.finish()
"""
SEND = """
import time
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import celery_client, dispatch
from workers.contracts.wire import envelope, names
from workers.contracts.wire.node_messages import ControlOrder

attempt = Attempt.objects.select_related("run").get(run_id=RUN)
node = Node.objects.get()
secret, now = fleet.node_secret(node), time.time()
again = dispatch.launch_order(attempt, attempt.placement[0], gpu=False).to_dict()
forged = {"attempt": 9, "attempt_id": "999", "fence": "f" * 32, "run_dir": f"runs/{RUN}/attempt-9"}
other = {**again, **forged}
order = ControlOrder(
    attempt_id=str(attempt.pk), fence=str(attempt.fence), action="kill", grace_s=0.0
)
kill = order.to_dict()


def sealed(body, key=secret, kind=names.KIND_LAUNCH, at=now):
    return envelope.seal(key, kind, body, ttl_s=60, now=at, node=node.name)


def send(text, task=names.TASK_LAUNCH):
    celery_client.send([celery_client.Order(task, node.name, text)])


twice = sealed(again)
send(twice)
send(twice)
send(sealed(again))
send(sealed(other, key=b"x" * 32))
send(sealed(other, at=now - 3600))
send(sealed(again).replace("/attempt-1", "/attempt-9"))
send(sealed(other, kind=names.KIND_PROBE))
send("no envelope")
send(sealed(kill, key=b"x" * 32, kind=names.KIND_CONTROL), names.TASK_CONTROL)
send(sealed({**other, "run_dir": "../attempt-9"}))
"""


def test_repeated_or_forged_orders_change_nothing(orrery: Orrery) -> None:
    """While a program of two processes runs, for as long as it takes."""
    place = orrery.home / "data" / "ordered"
    place.mkdir(parents=True)
    (place / "train.py").write_text(PROGRAM)
    script = {"command": ["train.py"], "workdir": "ordered"}
    run = orrery.submit({"kind": "script", "script": script, "resources": {"devices": 2}})
    orrery.until_step(run, 20)
    folder = orrery.folder(run)
    begun, attempts = (
        json.loads((folder / "supervisor.json").read_text()),
        set(orrery.home.parent.rglob("attempt-*")),
    )
    log = orrery.home / "logs" / "agent.log"
    before = log.stat().st_size
    orrery.shell(SEND.replace("RUN", run))

    orrery.until(
        lambda: "is not under runs/" in log.read_text()[before:], 120, "the last order was taken"
    )
    words = log.read_text()[before:]
    refused = ["replayed", "forged", "expired", "forged", "kind", "malformed", "forged"]
    assert re.findall(r"order was refused \((\w+)\)", words) == refused, words
    # the same once more, and the same under a new seal
    assert words.count(": launched before") == 2, words
    commands = {process.pid: words_of(process) for process in orrery.processes()}
    assert [
        pid for pid, words in commands.items() if {"workers.launcher", str(folder)} <= set(words)
    ] == [begun["pid"]]
    # the two do not wait for one another
    last = [orrery.written(run, rank=rank) for rank in (0, 1)]
    orrery.until(
        lambda: all(orrery.written(run, rank=rank) > last[rank] for rank in (0, 1)),
        120,
        "both continue",
    )
    (folder / "code" / "stop").touch()  # the program starts in its own copy
    assert orrery.until_state(run, "finished", "failed", "cancelled", "queued") == "finished"
    assert len(orrery.get(f"runs/{run}/attempts")["items"]) == 1
    orrery.until_reported(run)
    for rank in (0, 1):
        steps = orrery.steps(run, rank=rank)
        assert steps == list(range(1, orrery.written(run, rank=rank) + 1)), (
            f"rank {rank} lacks points"
        )
    assert json.loads((folder / "supervisor.json").read_text())["pid"] == begun["pid"]
    assert set(orrery.home.parent.rglob("attempt-*")) == attempts
    garbage_is_collected_by_the_agent(orrery, run)


COLLECT = """
import json
from datetime import timedelta
from django.conf import settings
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.background_jobs import garbage
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run

settings.ENV = Env(gc_folder_days=1, gc_checkpoint_days=1)
run = Run.objects.get(pk=RUN)
for step in (1, 2) if not run.checkpoints.exists() else ():
    path = f"runs/{run.pk}/checkpoints/step_{step}"
    (settings.ENV.home / path).mkdir(parents=True)
    (settings.ENV.home / path / "weights").write_bytes(b"x" * 10_000)
    runs.checkpoint_record(run=run, attempt=1, step=step, path=path, bytes=10_000)
Run.objects.filter(pk=RUN).update(ended=clock.now() - timedelta(days=2))
counts = garbage.collect_garbage(dry_run=DRY, renew=lambda: None)
if SCAN:
    counts["orders"] = garbage._send_orders(lambda: None)
print(json.dumps(counts))
"""


def garbage_is_collected_by_the_agent(orrery: Orrery, run: str) -> None:
    """A scan, a dry run with real sizes, then the order that deletes, by the node's agent."""

    def collect(*, dry: bool, scan: bool = False) -> dict[str, int]:
        code = COLLECT.replace("RUN", run).replace("DRY", str(dry)).replace("SCAN", str(scan))
        counts: dict[str, int] = json.loads(orrery.shell(code).strip().splitlines()[-1])
        return counts

    folder, home = orrery.folder(run), orrery.home
    assert collect(dry=True, scan=True)["orders"] == 1
    orrery.until(lambda: orrery.get("storage/folders")["items"], 120, "the agent scanned")
    counted = collect(dry=True)
    assert (counted["checkpoints"], counted["checkpoint_bytes"]) == (1, 10_000)
    assert counted["attempt_folders"] == 1 and counted["attempt_folder_bytes"] > 1_000
    assert folder.is_dir()
    assert collect(dry=False) == {**counted, "orders": 1}

    def freed() -> dict[str, int] | None:
        rows = orrery.get("storage/deletions")["items"]
        done = {row["kind"]: row["freed"] for row in rows if row["done"]}
        return done if len(done) == 2 else None

    assert orrery.until(freed, 120, "the agent deleted both") == {
        "checkpoint": 10_000,
        "attempt": counted["attempt_folder_bytes"],
    }
    assert not folder.exists()
    assert sorted(path.name for path in (home / f"runs/{run}/checkpoints").iterdir()) == ["step_2"]
