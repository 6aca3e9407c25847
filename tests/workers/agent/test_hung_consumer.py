"""When an agent takes its order consumer for hung, and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.agent import agent as agents
from workers.agent.agent import Agent
from workers.contracts.wire import names


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(agents, "time", made)
    monkeypatch.setattr("workers.agent.orders.time", made)
    monkeypatch.delenv(agents._RESTARTS, raising=False)
    return made


def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int = 1) -> Agent:
    """An agent without a broker; `waiting` orders are in its queue."""
    node_file = tmp_path / "node.json"
    node = {"node": "n1", "secret": "00" * 32, "redis": "redis://127.0.0.1:1/0", "address": "::1"}
    node_file.write_text(json.dumps(node))
    machine: Any = SimpleNamespace(problems=dict, inventory=lambda: None, samples=lambda pids: [])
    made = Agent(home=tmp_path, machine=machine, node_file=node_file, heartbeat_s=1.0)
    monkeypatch.setattr(made._reports, "heartbeat", lambda *_, **__: True)
    monkeypatch.setattr(made._reports, "orders_waiting", lambda: waiting)
    monkeypatch.setattr(type(made._orders), "alive", True)
    monkeypatch.setattr(made._counters, "sample", lambda: None)
    return made


def hung_after(made: Agent, clock: Clock, most_s: int = 600) -> int | None:
    """The seconds of beats after which the agent restarts itself; None: it does not."""
    for second in range(1, most_s + 1):
        clock.now += 1.0
        made._beat()
        if made.consumer_hung:
            return second
    return None


def test_the_patience_doubles_with_each_restart_in_a_row(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [hung_after(agent(tmp_path, monkeypatch), clock) for _ in range(6)]
    assert waits == [16, 31, 61, 121, 241, 241]


def test_a_consumed_order_resets_the_patience(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(agents._RESTARTS, "3")
    made = agent(tmp_path, monkeypatch)
    assert made.hung_s == 120.0
    clock.now += 1.0
    made._orders.app.tasks[names.TASK_PROBE]("not sealed")
    assert made.hung_s == 15.0
    assert hung_after(made, clock) == 16


def test_an_empty_queue_is_no_sign(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hung_after(agent(tmp_path, monkeypatch, waiting=0), clock) is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_order_is_no_sign(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Such as the copy of a large checkpoint that is pinned."""
    made = agent(tmp_path, monkeypatch)
    during: list[int | None] = []

    def pin(text: str) -> None:
        during.append(hung_after(made, clock))
        if fails:
            raise OSError("the disk is full")

    made._orders._task(pin)("an order")
    assert during == [None]
    assert hung_after(made, clock) == 16, "the next order waits too long"
