"""A real agent on a real Redis: joins once, acts once on sealed orders, loses no attempt."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.redis_server import RedisServer
from tests.workers.agent.conftest import Agent
from tests.workers.launcher.harness import ROOT, script
from workers.contracts.wire import liveness, names
from workers.launcher import processes
from workers.launcher.rundir import read_json

pytestmark = pytest.mark.flow

SLEEPS = script("print('up', flush=True)\ntime.sleep(600)")


def test_the_token_is_needed_once_and_the_secret_stays_private(agent: Agent) -> None:
    agent.start()
    node_file = agent.home / "agent" / "n1" / "node.json"
    assert stat.S_IMODE(node_file.stat().st_mode) == 0o600
    assert (
        read_json(node_file)["secret"] == agent.bench.secret.hex()
        and agent.token not in node_file.read_text()
    )
    inventory = agent.joins[0]["inventory"]
    assert [device["kind"] for device in inventory["devices"]] == ["cpu", "cpu"] and inventory[
        "cores"
    ] >= 1
    agent.end()
    agent.start(join=False)
    assert len(agent.joins) == 1 and agent.beats[-1]["node"] == "n1"
    # its node deletes what an order of garbage collection names, and reports it
    path = "runs/7/checkpoints/step_5"
    (agent.home / path).mkdir(parents=True)
    (agent.home / path / "weights").write_bytes(b"y" * 100)
    order = {"checkpoints": [path, "../elsewhere"], "scan": True}
    agent.send(names.TASK_COLLECT, agent.sealed(names.KIND_COLLECT, order))
    agent.until(
        lambda: any(report.get("runs") is not None for report in agent.collected),
        "the scan is reported",
    )
    items = {item["path"]: item for report in agent.collected for item in report["collected"]}
    assert items[path]["bytes"] == 100 and not (agent.home / path).exists()
    assert items["../elsewhere"]["problem"]


def test_without_a_token_the_error_has_a_hint(tmp_path: Path, redis_url: str) -> None:
    command = [
        sys.executable,
        "-m",
        "workers.agent",
        "--redis",
        redis_url,
        "--home",
        str(tmp_path),
        "--name",
        "n1",
    ]
    environ = {name: value for name, value in os.environ.items() if name != "ORRERY_JOIN"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 1 and "Set --join TOKEN" in done.stderr


def test_orders_count_once_and_only_rightly_sealed(agent: Agent) -> None:
    agent.start()
    good = agent.bench.order(SLEEPS)
    others = [agent.bench.order(SLEEPS, run=str(number)) for number in (11, 12, 13)]
    text = agent.sealed(names.KIND_LAUNCH, good)
    agent.send(names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, others[0], secret=b"guess"))
    agent.send(names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, others[1], now=time.time() - 100))
    agent.send(
        names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, {**others[2], "run_dir": "../elsewhere"})
    )
    agent.send(names.TASK_CONTROL, text)
    for _ in range(2):
        agent.send(names.TASK_LAUNCH, text)
    agent.send(names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, good))
    agent.until(lambda: "launched before" in agent.log(), "the duplicate was looked at")
    for word in (
        "refused (forged)",
        "refused (expired)",
        "is not under runs/",
        "refused (kind)",
        "refused (replayed)",
    ):
        assert word in agent.log()
    agent.until(lambda: [r for r in agent.bench.reports if r["type"] == "running"], "running")
    assert sorted(path.name for path in (agent.home / "runs").iterdir()) == ["7"]
    assert len([r for r in agent.bench.reports if r["type"] == "launching"]) == 1


def test_unreadable_messages_stop_no_order(agent: Agent) -> None:
    properties = {
        "body_encoding": "base64",
        "delivery_tag": "1",
        "delivery_info": {"exchange": "", "routing_key": names.node_queue("n1")},
    }
    message = {
        "body": "%%%",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": names.TASK_LAUNCH, "id": "1", "lang": "py"},
        "properties": properties,
    }
    agent.start()
    process = agent.process
    with redis.Redis.from_url(agent.url) as client:
        for raw in (
            json.dumps(message),
            json.dumps({**message, "properties": {}}),
            json.dumps({**message, "properties": {**properties, "body_encoding": "unknown"}}),
            json.dumps({"body": "e30="}),
            "[]",
            "not JSON",
            b"\xff\xfe",
            "[" * 100_000,
            json.dumps({**message, "body": "e30="}),  # readable, but not a task's arguments
            json.dumps({**message, "body": "W10=", "headers": {}}),
        ):
            client.lpush(names.node_queue("n1"), raw)
        agent.launch(agent.bench.order(SLEEPS))
        agent.until(lambda: not client.exists("unacked"), "no message comes back")
        key = liveness.heartbeat_key("n1")

        def beat() -> dict[str, Any]:
            [(_, fields)] = client.xrevrange(key, count=1)
            content: dict[str, Any] = json.loads(fields[b"m"].partition(b".")[2])
            return content["body"]

        agent.until(lambda: beat().get("dropped_orders", 0) >= 7, "the heartbeat has their number")
    assert agent.process is process and process is not None and process.poll() is None
    assert "restarting this agent" not in agent.log()


def test_a_restarted_agent_finds_its_attempts_and_can_still_end_them(agent: Agent) -> None:
    agent.start()
    order = agent.bench.order(SLEEPS)
    run_dir = agent.launch(order)
    supervisor = read_json(run_dir / "supervisor.json")["pid"]
    agent.until(lambda: [r for r in agent.bench.reports if r["type"] == "running"], "running")
    agent.end(signal.SIGKILL)
    agent.start(join=False)
    assert read_json(run_dir / "supervisor.json")["pid"] == supervisor
    agent.until(
        lambda: (
            [(each["fence"], each["state"]) for each in agent.beats[-1]["attempts"]]
            == [(order["fence"], "running")]
        ),
        "reported as running",
    )
    sample = agent.beats[-1]["samples"][1]
    assert (
        sample["processes"] == [read_json(run_dir / "rank-1" / "process.json")["pid"]]
        and sample["memory_used_bytes"] > 0
    )
    agent.control(order, "cancel")
    assert agent.bench.exited(order)["class"] == "cancelled"
    agent.until(lambda: agent.beats[-1]["attempts"] == [], "nothing runs any more")


@pytest.mark.parametrize("while_away", [True, False])
def test_a_killed_supervisor_is_detected_and_reported(agent: Agent, while_away: bool) -> None:
    agent.start()
    order = agent.bench.order(SLEEPS)
    run_dir = agent.launch(order)
    agent.until(lambda: [r for r in agent.bench.reports if r["type"] == "running"], "running")
    agent.until(lambda: "up" in (run_dir / "rank-0" / "stdout.log").read_text(), "a line to send")
    if while_away:
        agent.end(signal.SIGKILL)
    os.kill(read_json(run_dir / "supervisor.json")["pid"], signal.SIGKILL)
    if while_away:
        agent.start(join=False)
    result = agent.bench.exited(order)
    assert result["class"] == "infrastructure" and "supervisor died" in result["reason"]
    assert "up" in agent.bench.lines(0), "what was on disk was sent"


def test_what_was_to_be_ended_before_it_came_does_not_start(agent: Agent) -> None:
    agent.start()
    order = agent.bench.order(SLEEPS)
    agent.control(order, "cancel")
    assert agent.bench.exited(order)["class"] == "lost"
    agent.send(names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, order))
    agent.until(lambda: "cancelled before it arrived" in agent.log(), "the late order")
    assert not (agent.home / order["run_dir"]).exists()


def test_embedded_mode_ends_its_runs_with_itself(agent: Agent) -> None:
    agent.start("--stop-runs")
    order = agent.bench.order(SLEEPS)
    agent.launch(order)
    agent.until(lambda: [r for r in agent.bench.reports if r["type"] == "running"], "running")
    agent.end()
    assert processes.members(order["fence"]) == []
    assert agent.bench.exited(order)["class"] == "preempted"


def test_an_unwritable_folder_is_reported_at_once(agent: Agent) -> None:
    agent.start()
    order = agent.bench.order(SLEEPS)
    (agent.home / "runs").write_text("a file where a folder should be")
    agent.send(names.TASK_LAUNCH, agent.sealed(names.KIND_LAUNCH, order))
    result = agent.bench.exited(order)
    assert result["class"] == "infrastructure" and "cannot be used" in result["reason"]


def test_two_agents_of_one_name_are_one_too_many(agent: Agent) -> None:
    agent.start()
    command = [
        sys.executable,
        "-m",
        "workers.agent",
        "--redis",
        agent.url,
        "--home",
        str(agent.home),
        "--name",
        "n1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and "already runs here" in done.stderr


def test_orders_and_beats_go_on_after_redis_was_killed(tmp_path: Path) -> None:
    server = RedisServer(Path(tempfile.mkdtemp(prefix="orrery-redis-"))).start()
    agent = Agent(tmp_path / "home", server.url)
    try:
        agent.start()
        server.kill()
        time.sleep(1.0)
        server.start()
        beats = len(agent.beats)
        agent.until(lambda: len(agent.beats) > beats, "beats again")
        order = agent.bench.order(script("print('late')"), ranks=1)
        agent.launch(order)
        assert agent.bench.exited(order)["class"] == "ok"
        assert json.loads((agent.home / "agent" / "n1" / "node.json").read_text())["node"] == "n1"
    finally:
        agent.close()
        server.stop()
