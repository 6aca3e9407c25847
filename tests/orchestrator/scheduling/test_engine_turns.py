"""Threads that pass over engines: none delays another, and none ends with a failed pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling.cluster_engines import turns as turns_module
from orchestrator.scheduling.cluster_engines.turns import EngineTurns
from orchestrator.scheduling.cluster_engines.watcher import Watcher
from tests.orchestrator.scheduling.recorded_engine import Recorded, one_pass

SELDOM = {"poll_s": 60.0}

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the engines that were passed over."""
    names: list[str] = []

    def sync(row: EngineRow, *_: object, **options: object) -> bool:
        names.append(row.name)
        return False

    monkeypatch.setattr(turns_module, "sync", sync)
    monkeypatch.setattr(turns_module.contact, "connect", lambda row: None)
    return names


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def waits(engine: EngineRow, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    """Starts no threads: each `_turn_all` is one turn of all engines, if they are due."""
    EngineRow.objects.filter(pk=engine.pk).update(settings=SELDOM)
    monkeypatch.setattr(EngineTurns, "start", lambda self: None)
    return Watcher(lambda: True)


def _turn_all(watcher: Watcher) -> None:
    watcher._tend()
    for turns in watcher._turns.values():
        turns.turn()


def test_a_new_run_is_submitted_before_the_next_turn_of_its_engine(
    engine: EngineRow,
    run: Run,
    waits: Watcher,
    passed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = engines.engine_add(by=None, name="idle", settings=SELDOM)
    _turn_all(waits)
    assert sorted(passed) == ["hpc", other.name]
    _turn_all(waits)
    assert len(passed) == 2  # neither is due
    monkeypatch.setattr(turns_module, "LEAST_S", 0.0)
    # the last pass left these runs waiting, or they may not start yet
    soon = clock.now() + timedelta(hours=1)
    for waiting in ({"queued_at": soon - timedelta(hours=2)}, {"not_before": soon}):
        Run.objects.update(**{"queued_at": soon, "not_before": None, **waiting})
        waits.wake()
        _turn_all(waits)
        assert len(passed) == 2
    Run.objects.update(queued_at=clock.now(), not_before=None)
    waits.wake()
    _turn_all(waits)
    assert passed[2:] == ["hpc"]
    one_pass(engine, Recorded(), run)  # it has a job now
    waits.wake()
    _turn_all(waits)
    assert len(passed) == 3


def test_the_job_of_a_stopped_run_is_stopped_before_the_next_turn_of_its_engine(
    engine: EngineRow,
    run: Run,
    waits: Watcher,
    passed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines.engine_add(by=None, name="idle", settings=SELDOM)
    monkeypatch.setattr(turns_module, "LEAST_S", 0.0)
    port = Recorded()
    one_pass(engine, port, run)
    _turn_all(waits)
    passed.clear()
    waits.wake()
    _turn_all(waits)
    assert passed == []
    runs.run_cancel(run=run, by=User.objects.get(pk=run.owner_id))
    waits.wake()
    _turn_all(waits)
    assert passed == ["hpc"]
    one_pass(engine, port, run)  # it requests the stop
    waits.wake()
    _turn_all(waits)
    assert passed == ["hpc"]


@pytest.mark.parametrize("error", [ValueError("no such column"), OSError("broken"), KeyError("x")])
def test_an_error_of_a_pass_is_logged_and_the_engine_has_its_next_turn(
    engine: EngineRow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """It says nothing about the engine's settings."""

    def fail(*_: object, **options: object) -> bool:
        raise error

    monkeypatch.setattr(turns_module, "sync", fail)
    turns = EngineTurns(engine.pk, lambda: True)
    began = time.monotonic()
    turns.turn()
    assert began + 3 <= turns.due <= time.monotonic() + 3
    engine.refresh_from_db()
    assert not engine.status.get("down") and "A pass over engine hpc failed" in caplog.text


def test_settings_that_cannot_be_read_are_reported(engine: EngineRow, passed: list[str]) -> None:
    EngineRow.objects.filter(pk=engine.pk).update(settings={"poll_s": "often"})
    turns = EngineTurns(engine.pk, lambda: True)
    turns.turn()
    engine.refresh_from_db()
    assert engine.status["message"].startswith("Its settings cannot be read")
    assert turns.due > time.monotonic() + 30 and passed == []


def test_a_request_during_a_pass_is_not_lost(engine: EngineRow, monkeypatch: Any) -> None:
    EngineRow.objects.filter(pk=engine.pk).update(settings=SELDOM)
    turns = EngineTurns(engine.pk, lambda: True)
    calls: list[int] = []

    def sync(*_: object, **options: object) -> bool:
        calls.append(1)
        if len(calls) == 1:
            turns.wake()
        return False

    monkeypatch.setattr(turns_module, "sync", sync)
    monkeypatch.setattr(turns_module, "LEAST_S", 0.0)
    for _ in range(3):
        turns.turn()
    assert len(calls) == 2


@pytest.mark.django_db(transaction=True)
def test_an_engine_that_does_not_answer_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, quick = (
        engines.engine_add(by=None, name=name, settings={"poll_s": 0.5})
        for name in ("a-silent", "b-quick")
    )
    answer = threading.Event()
    passed: list[int] = []

    def sync(row: EngineRow, *_: object, **options: object) -> bool:
        passed.append(row.pk)
        if row.pk == silent.pk:
            answer.wait(30)
        return False

    monkeypatch.setattr(turns_module, "sync", sync)
    watcher = Watcher(lambda: True)
    watcher.start()
    try:
        until(lambda: passed.count(quick.pk) >= 3)
        assert passed.count(silent.pk) == 1
        EngineRow.objects.filter(pk=quick.pk).delete()
        until(lambda: list(watcher._turns) == [silent.pk])
    finally:
        answer.set()
        watcher.close()
    until(lambda: not any(one.name.startswith("engine ") for one in threading.enumerate()))
