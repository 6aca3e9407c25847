"""The tables of allowed transitions, and the event that each transition records."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from orchestrator.accounts.models import User
from orchestrator.runs import events, selectors, states
from orchestrator.runs.models import Attempt, Run, RunEvent
from tests import factories
from workers.contracts.wire.node_messages import AttemptState, RunState

RUN_TABLE = {
    "queued": "starting paused cancelled",
    "starting": "running stopping queued paused finished failed cancelled",
    "running": "stopping queued paused finished failed cancelled",
    "stopping": "queued paused finished failed cancelled",
    "paused": "queued cancelled",
    "finished": "queued",
    "failed": "queued",
    "cancelled": "queued",
}
ATTEMPT_TABLE = {
    "assigned": "launching running exited",
    "launching": "running exited",
    "running": "exited",
    "exited": "",
}


@pytest.fixture
def attempt(owner: User, clock: Any) -> Attempt:
    run = factories.run(owner)
    return factories.running(run, factories.node())


def last_event(run: Run) -> RunEvent:
    return list(selectors.events_of(run=run, types=["state_changed"]))[-1]


def test_the_tables_and_sets_are_exactly_these() -> None:
    runs = {str(old): {str(to) for to in moves} for old, moves in states.RUN_MOVES.items()}
    attempts = {str(old): {str(to) for to in moves} for old, moves in states.ATTEMPT_MOVES.items()}
    assert runs == {old: set(moves.split()) for old, moves in RUN_TABLE.items()}
    assert attempts == {old: set(moves.split()) for old, moves in ATTEMPT_TABLE.items()}
    assert {str(state) for state in states.ENDED} == {"finished", "failed", "cancelled"}
    assert {str(state) for state in states.ACTIVE} == {"starting", "running", "stopping"}


def test_each_run_transition_outside_the_table_raises(owner: User) -> None:
    run = factories.run(owner)
    for old, moves in RUN_TABLE.items():
        run.state = old
        for to in set(RUN_TABLE) - set(moves.split()):
            with pytest.raises(ValueError, match=f"a run cannot go from {old} to {to}"):
                states.run_move(run, RunState(to))


def test_a_transition_records_who_and_why_and_the_attempt(owner: User) -> None:
    run = factories.run(owner)
    first = last_event(run)
    assert first.data == {
        "of": "run",
        "old": None,
        "new": "queued",
        "by": owner.username,
        "why": "submitted",
    }
    assert first.attempt is None
    assert states.run_move(run, RunState.PAUSED) is True
    moved = last_event(run)
    assert moved.data == {
        "of": "run",
        "old": "queued",
        "new": "paused",
        "by": "control plane",
        "why": "",
    }
    assert moved.attempt is None and run.state == "paused"
    assert states.run_move(run, RunState.QUEUED, by="ann", why="asked", wait_reason="soon") is True
    assert (run.wait_reason, last_event(run).data["by"], last_event(run).data["why"]) == (
        "soon",
        "ann",
        "asked",
    )


def test_a_transition_of_a_started_run_names_its_attempt(attempt: Attempt) -> None:
    run = Run.objects.get(pk=attempt.run_id)
    assert states.run_move(run, RunState.STOPPING)
    assert (last_event(run).attempt, last_event(run).data["old"]) == (attempt.number, "running")


def test_an_attempt_moves_once_and_records_it(attempt: Attempt) -> None:
    assert states.attempt_move(attempt, AttemptState.RUNNING) is False
    count = RunEvent.objects.count()
    assert states.attempt_move(attempt, AttemptState.EXITED, exit_class="ok") is True
    event = last_event(attempt.run)
    assert event.data == {
        "of": "attempt",
        "old": "running",
        "new": "exited",
        "by": "node",
        "why": "",
    }
    assert (event.attempt, attempt.exit_class, RunEvent.objects.count()) == (
        attempt.number,
        "ok",
        count + 1,
    )
    assert states.attempt_move(attempt, AttemptState.EXITED) is False


def test_an_attempts_old_state_is_read_under_the_runs_lock(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempt.objects.filter(pk=attempt.pk).update(state=AttemptState.ASSIGNED)
    attempt.refresh_from_db()
    lock, locked = events.lock, []

    def lock_late(run_id: int) -> None:
        """Another report arrives before this one gets the lock."""
        if not locked:
            Attempt.objects.filter(pk=attempt.pk).update(state=AttemptState.LAUNCHING)
        locked.append((run_id, connection.in_atomic_block))
        lock(run_id)

    monkeypatch.setattr(events, "lock", lock_late)
    assert states.attempt_move(attempt, AttemptState.RUNNING)
    assert locked[0] == (attempt.run_id, True)
    assert last_event(attempt.run).data["old"] == "launching"
