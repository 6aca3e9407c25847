"""`kill -9` of every part in the middle of a run: nothing starts twice, no point is lost or doubled, the run goes on.

One embedded Orrery for all; each fault has a run of its own on two ranks. Orders that nobody should obey, and a disk
that takes nothing, are here too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.embedded import ROOT, Orrery, train_spec

pytestmark = [pytest.mark.flow, pytest.mark.timeout(300)]

STEPS, EVERY, RANKS = 240, 20, (0, 1)


@pytest.fixture(scope="module")
def orrery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Orrery]:
    server = Orrery(tmp_path_factory.mktemp("faults") / "home", devices=2)
    server.start()
    yield server
    server.close()


def attempt_dir(orrery: Orrery, run: str, attempt: int = 1) -> Path:
    return orrery.home / "runs" / run / f"attempt-{attempt}"


def pid_in(path: Path) -> int:
    return int(json.loads(path.read_text())["pid"])


def supervisors(orrery: Orrery, run: str) -> list[int]:
    """Living supervisors of any attempt of the run."""
    folder = str(orrery.home / "runs" / run) + os.sep
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "workers.launcher" in words and any(word.startswith(folder) for word in words):
            found.append(process.pid)
    return found


def in_the_middle(orrery: Orrery) -> str:
    """A run that has left its second checkpoint behind and has most of its way before it."""
    run = orrery.submit(train_spec(steps=STEPS, every=EVERY))
    orrery.until_step(run, 2 * EVERY + 3)
    assert orrery.state(run) == "running"
    return run


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_part(orrery: Orrery, name: str) -> None:
    """Kills one part and waits until its keeper has another."""
    before = orrery.pid_of(name)
    kill(before)
    orrery.until(lambda: orrery.pid_of(name) != before, 30, f"another {name}")
    import time; time.sleep(2)
    for f in orrery.home.glob("runs/*/attempt-*/rank-0/points.jsonl"):
        print(name, f, f.read_text().count("\n"))


def finished(orrery: Orrery, run: str) -> list[dict[str, Any]]:
    """Waits for the end; returns the attempts, oldest first."""
    state = orrery.until_state(run, "finished", "failed", "cancelled", seconds=150)
    assert state == "finished", f"{orrery.get(f'runs/{run}')['exit']}\n{orrery.last_words()}"
    return list(orrery.get(f"runs/{run}/attempts")["items"])


def rows(orrery: Orrery, run: str, **params: Any) -> list[tuple[int, int, int]]:
    """`(attempt, seq, step)` of every stored point of `loss`, from the raw CSV."""
    assert orrery.client is not None
    asked = {"name": "loss", "raw": 1, **params}
    answer = orrery.client.get(f"runs/{run}/series", params=asked, headers={"Accept": "text/csv"})
    assert answer.status_code == 200, answer.text
    head, *lines = answer.text.splitlines()
    assert head == "attempt,rank,seq,step,tokens,time,value"
    cells = [line.split(",") for line in lines]
    return [(int(attempt), int(seq), int(step)) for attempt, _, seq, step, *_ in cells]


def assert_complete(orrery: Orrery, run: str, attempts: int = 1) -> None:
    """Steps 1…N of every rank in the series, and each attempt's own numbers without a gap or a double."""
    for rank in RANKS:
        assert [step for _, _, step in rows(orrery, run, rank=rank)] == list(range(1, STEPS + 1)), f"rank {rank}"
        for attempt in range(1, attempts + 1):
            own = rows(orrery, run, rank=rank, attempt=attempt)
            assert [seq for _, seq, _ in own] == list(range(1, len(own) + 1)), f"attempt {attempt}, rank {rank}"
            steps = [step for _, _, step in own]
            assert steps == list(range(steps[0], steps[0] + len(steps))), f"attempt {attempt}, rank {rank}"


def moves(orrery: Orrery, run: str) -> list[dict[str, Any]]:
    """The run's own state changes; each begins where the one before ended."""
    events = orrery.get(f"runs/{run}/events", type="state_changed", limit=200)["items"]
    found = [event["data"] for event in events if event["data"]["of"] == "run"]
    assert all(before["new"] == after["old"] for before, after in pairwise(found)), found
    assert all(move["why"] for move in found), found
    return found


def assert_undisturbed(orrery: Orrery, run: str, supervisor: int) -> None:
    """Finished in its first attempt, under the supervisor that it began with."""
    attempts = finished(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts] == ["ok"]
    assert pid_in(attempt_dir(orrery, run) / "supervisor.json") == supervisor, "the attempt was started twice"
    assert [move["new"] for move in moves(orrery, run)] == ["queued", "starting", "running", "finished"]
    assert_complete(orrery, run)


@pytest.mark.parametrize("part", ["web", "scheduler", "ingest", "agent", "valkey"])
def test_a_killed_part_comes_back_and_the_run_does_not_notice(orrery: Orrery, part: str) -> None:
    run = in_the_middle(orrery)
    supervisor = pid_in(attempt_dir(orrery, run) / "supervisor.json")
    kill_part(orrery, part)
    assert_undisturbed(orrery, run, supervisor)
    # and what came back does its part for the next one
    after = orrery.submit({"kind": "script", "script": {"command": ["--no-python", "true"]}}, name=f"after {part}")
    assert orrery.until_state(after, "finished", "failed") == "finished"


@pytest.mark.parametrize("part", ["scheduler", "agent"])
def test_a_part_killed_while_an_attempt_starts_does_not_start_it_twice(orrery: Orrery, part: str) -> None:
    run = orrery.submit(train_spec(steps=STEPS, every=EVERY))
    orrery.until(lambda: (attempt_dir(orrery, run) / "order.json").exists(), 30, "the order is claimed")
    kill_part(orrery, part)
    orrery.until_state(run, "running", "finished")
    assert len(supervisors(orrery, run)) <= 1
    assert_undisturbed(orrery, run, pid_in(attempt_dir(orrery, run) / "supervisor.json"))


@pytest.mark.parametrize("victim", ["supervisor", "rank"])
def test_a_killed_attempt_resumes_from_its_last_checkpoint(orrery: Orrery, victim: str) -> None:
    run = in_the_middle(orrery)
    folder = attempt_dir(orrery, run)
    ranks = [pid_in(folder / f"rank-{rank}" / "process.json") for rank in RANKS]
    kill(pid_in(folder / "supervisor.json") if victim == "supervisor" else ranks[1])

    attempts = finished(orrery, run)
    assert [attempt["exit_class"] for attempt in attempts] == ["infrastructure", "ok"]
    says = "supervisor was gone" if victim == "supervisor" else "Rank 1 was ended by SIGKILL"
    assert says in attempts[0]["exit"]["reason"]
    assert not any(psutil.pid_exists(pid) for pid in ranks), "ranks of the first attempt live on"
    told = moves(orrery, run)
    words = ["queued", "starting", "running", "queued", "starting", "running", "finished"]
    assert [move["new"] for move in told] == words
    assert "retry 1 of 5" in told[3]["why"] and says in told[3]["why"]

    events = orrery.get(f"runs/{run}/events", limit=200)["items"]
    if victim == "rank":
        gone = [event for event in events if event["type"] == "rank_exited" and event["rank"] == 1]
        assert [event["data"]["signal"] for event in gone] == ["SIGKILL"]
    saved = [e["data"]["step"] for e in events if e["type"] == "checkpoint_saved" and e["attempt"] == 1]
    restored = {event["data"]["step"] for event in events if event["type"] == "checkpoint_restored"}
    assert restored == {max(saved)}
    for rank in RANKS:
        assert rows(orrery, run, rank=rank, attempt=2)[0][2] == max(saved) + 1
    assert_complete(orrery, run, attempts=2)


ORDERS = """
import time
from orchestrator.fleet import selectors as fleet
from orchestrator.fleet.models import Device, Node
from orchestrator.runs.models import Attempt
from orchestrator.scheduling import celery_client, dispatch
from workers.contracts import envelope, wire

attempt = Attempt.objects.select_related("run").get(run_id=RUN)
node = Node.objects.get()
secret, now = fleet.node_secret(node), time.time()
again = dispatch.launch_order(attempt, attempt.placement[0], gpu=False).to_dict()
other = {**again, "attempt": 9, "attempt_id": "999", "fence": "f" * 32, "run_dir": f"runs/{RUN}/attempt-9"}
seal = lambda key, body, at=now: envelope.seal(key, wire.KIND_LAUNCH, body, ttl_s=60, now=at, node=node.name)
twice = seal(secret, again)
changed = seal(secret, again).replace(f"runs/{RUN}/attempt-1", f"runs/{RUN}/attempt-9")
sent = {
    "again": [twice, twice, seal(secret, again)],
    "nobody": [seal(b"x" * 32, other), seal(secret, other, now - 3600), changed, "no envelope"],
    "outside": [seal(secret, {**other, "run_dir": "../attempt-9"})],
}
for texts in sent.values():
    for text in texts:
        celery_client.send(task=wire.TASK_LAUNCH, node=node.name, envelope=text)
"""


def test_orders_that_repeat_or_lie_start_nothing(orrery: Orrery) -> None:
    """What who can reach Redis may try, sealed with the real secret or with another one, put on the node's queue."""
    run = in_the_middle(orrery)
    supervisor = pid_in(attempt_dir(orrery, run) / "supervisor.json")
    log = orrery.home / "logs" / "agent.log"
    before = log.stat().st_size
    valkey = orrery.home / "valkey"
    url = f"redis://:{(valkey / 'password').read_text()}@127.0.0.1:{(valkey / 'port').read_text()}/0"
    command = [sys.executable, str(ROOT / "manage.py"), "shell", "-c", ORDERS.replace("RUN", run)]
    environ = {**orrery.environ, "ORRERY_HOME": str(orrery.home), "REDIS_URL": url}
    subprocess.run(command, env=environ, check=True, timeout=60)

    orrery.until(lambda: "is not under runs/" in log.read_text()[before:], 30, "the last order was taken")
    words = log.read_text()[before:]
    assert words.count("was refused") == 5, words  # the repeated text, another key, expired, changed, nonsense
    assert words.count("launched before") >= 2, words
    assert supervisors(orrery, run) in ([supervisor], [])
    assert [path.name for path in (orrery.home / "runs" / run).glob("attempt-*")] == ["attempt-1"]
    assert_undisturbed(orrery, run, supervisor)
    assert [path.name for path in orrery.home.parent.rglob("attempt-9")] == []


def prepared(orrery: Orrery, spec: dict[str, Any], *, prepare: Any) -> str:
    """Submits while the node is drained, so that its place on disk can be spoiled before it is used."""
    assert orrery.client is not None
    node = orrery.get("nodes")["items"][0]["id"]
    assert orrery.client.post(f"nodes/{node}/drain", json={"reason": "test"}).is_success
    run = orrery.submit(spec)
    prepare(run)
    assert orrery.client.post(f"nodes/{node}/undrain").is_success
    return run


def test_a_run_directory_that_cannot_be_made_is_told(orrery: Orrery) -> None:
    def a_file_in_its_place(run: str) -> None:
        (orrery.home / "runs").mkdir(exist_ok=True)
        (orrery.home / "runs" / run).write_text("not a folder")

    run = prepared(orrery, train_spec(steps=5, retries={"infrastructure": 1}), prepare=a_file_in_its_place)
    assert orrery.until_state(run, "finished", "failed") == "failed"
    attempts = orrery.get(f"runs/{run}/attempts")["items"]
    assert [attempt["exit_class"] for attempt in attempts] == ["infrastructure", "infrastructure"]
    told = orrery.get(f"runs/{run}")["exit"]
    assert told["class"] == "infrastructure"
    assert f"runs/{run}/attempt-2" in told["reason"] and "cannot be used" in told["reason"], told
    assert moves(orrery, run)[-1]["new"] == "failed"


def test_a_full_disk_is_told(orrery: Orrery) -> None:
    """`/dev/full` takes no byte: it stands where one rank's outbox would be."""

    def no_room_for_points(run: str) -> None:
        folder = attempt_dir(orrery, run) / "rank-1"
        folder.mkdir(parents=True)
        (folder / "points.jsonl").symlink_to("/dev/full")

    run = prepared(orrery, train_spec(steps=5000, retries={"infrastructure": 0}), prepare=no_room_for_points)
    assert orrery.until_state(run, "finished", "failed") == "failed"
    told = orrery.get(f"runs/{run}")["exit"]
    assert (told["class"], told["rank"]) == ("infrastructure", 1)
    assert "No space left on device" in told["reason"], told
    orrery.until(lambda: not supervisors(orrery, run), 30, "its processes ended")
