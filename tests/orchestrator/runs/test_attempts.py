"""Attempt reports: budgets, fences, late and repeated reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.runs import selectors, services, states
from orchestrator.runs.lifecycle.retry_budgets import outcome
from orchestrator.runs.models import Attempt, Run
from tests import factories
from workers.contracts.exit_classes import ExitClass
from workers.contracts.specs.run import Retries
from workers.contracts.wire.node_messages import AttemptState, RunState


@pytest.fixture
def run(owner: User, clock: Any) -> Run:
    return factories.run(owner)


def start(run: Run) -> Attempt:
    run.refresh_from_db()
    return factories.running(run, factories.node())


def test_the_transition_tables_reach_every_state() -> None:
    assert set(states.RUN_MOVES) == set(RunState) and set(states.ATTEMPT_MOVES) == set(AttemptState)
    reached = {RunState.QUEUED}
    while more := {to for state in reached for to in states.RUN_MOVES[state]} - reached:
        reached |= more
    assert reached == set(RunState)
    for state in states.ACTIVE:
        assert {RunState.QUEUED, RunState.PAUSED, *states.ENDED} <= states.RUN_MOVES[state]


def test_a_transition_outside_the_table_raises(run: Run) -> None:
    with pytest.raises(ValueError, match="queued to running"):
        states.run_move(run, RunState.RUNNING)


def test_one_of_two_concurrent_moves_wins_and_the_other_leaves_no_trace(run: Run) -> None:
    stale = Run.objects.get(pk=run.pk)
    assert states.run_move(run, RunState.PAUSED)
    events, frames = len(selectors.events_of(run=run)), live.head("fleet")
    assert not states.run_move(stale, RunState.CANCELLED)
    assert (len(selectors.events_of(run=run)), live.head("fleet")) == (events, frames)


def test_a_complete_run_is_in_order_in_events_and_frames(run: Run, clock: Any) -> None:
    attempt = start(run)
    assert (run.state, run.started, attempt.launched) == ("running", clock.now(), clock.now())
    clock.advance(10)
    services.attempt_exited(attempt=attempt, exit_class="ok")
    run.refresh_from_db()
    assert (run.state, run.ended, run.exit["class"]) == ("finished", clock.now(), "ok")
    moves = [
        (event.data["of"], event.data["new"])
        for event in selectors.events_of(run=run, types=["state_changed"])
    ]
    assert moves == [
        ("run", "queued"),
        ("run", "starting"),
        ("attempt", "launching"),
        ("attempt", "running"),
        ("run", "running"),
        ("attempt", "exited"),
        ("run", "finished"),
    ]
    frames = [json.loads(text) for _, text in live.frames_after(f"run:{run.pk}", 0)]
    assert [frame["state"] for frame in frames if frame["type"] == "state"] == [
        "queued",
        "starting",
        "running",
        "finished",
    ]
    assert [frame["seq"] for frame in frames] == list(range(1, len(frames) + 1))


def test_repeated_late_or_stale_reports_change_nothing(run: Run) -> None:
    first = start(run)
    assert services.attempt_exited(attempt=first, exit_class="preempted") is not None
    second = start(run)
    before = len(selectors.events_of(run=run))
    for stale in (first, Attempt.objects.get(pk=first.pk)):
        assert services.attempt_exited(attempt=stale, exit_class="user_error") is None
        assert not services.attempt_running(attempt=stale)
        assert not services.attempt_launching(attempt=stale)
    assert not services.attempt_running(attempt=second)
    run.refresh_from_db()
    assert (run.state, run.attempt_number, len(selectors.events_of(run=run))) == (
        "running",
        2,
        before,
    )
    assert selectors.attempt_by_fence(attempt_id=str(first.pk), fence=str(second.fence)) is None
    assert selectors.attempt_by_fence(attempt_id=second.pk, fence=str(second.fence)) == second
    assert selectors.attempt_by_fence(attempt_id="nonsense", fence="x") is None


def test_an_exit_without_earlier_reports_counts(run: Run) -> None:
    attempt = services.attempt_create(run=run, placement=factories.placement(factories.node()))
    assert attempt is not None
    services.attempt_exited(attempt=attempt, exit_class="ok")
    run.refresh_from_db()
    assert run.state == "finished"


def test_a_queued_run_is_placed_once(run: Run) -> None:
    placement = factories.placement(factories.node())
    other = Run.objects.get(pk=run.pk)
    assert services.attempt_create(run=run, placement=placement) is not None
    assert services.attempt_create(run=other, placement=placement) is None
    assert Attempt.objects.count() == 1


def test_each_class_has_its_own_budget_and_a_growing_pause(run: Run, clock: Any) -> None:
    for number in range(2):
        services.attempt_exited(
            attempt=start(run), exit_class="hang", exit={"reason": "No step for 600 s"}
        )
        run.refresh_from_db()
        assert run.state == "queued" and run.budgets_used == {"hang": number + 1}
        assert (run.not_before - clock.now()).total_seconds() == 2**number
    services.attempt_exited(attempt=start(run), exit_class="preempted")
    run.refresh_from_db()
    assert (run.state, run.budgets_used, run.not_before) == ("queued", {"hang": 2}, None)
    services.attempt_exited(
        attempt=start(run), exit_class="hang", exit={"reason": "No step for 600 s"}
    )
    run.refresh_from_db()
    assert run.state == "failed"
    assert run.exit == {
        "class": "hang",
        "reason": "No step for 600 s. Ended by a hang; its 2 retries are used up.",
    }
    assert run.attempt_number == 4


def test_the_specs_own_budget_counts(owner: User, clock: Any) -> None:
    run = factories.run(owner, retries={"user_error": 1})
    services.attempt_exited(attempt=start(run), exit_class="user_error")
    run.refresh_from_db()
    assert run.state == "queued"
    services.attempt_exited(attempt=start(run), exit_class="user_error")
    run.refresh_from_db()
    assert run.state == "failed"


def test_each_nodes_first_exit_report_is_stored(run: Run) -> None:
    placement = [{"node": name, "address": "", "devices": [0], "node_rank": 0} for name in "ab"]
    attempt = services.attempt_create(run=run, placement=placement)
    assert attempt is not None
    services.attempt_node_exited(attempt=attempt, node="a", exit={"class": "ok"})
    services.attempt_node_exited(
        attempt=Attempt.objects.get(pk=attempt.pk), node="b", exit={"class": "hang"}
    )
    match = services.attempt_node_exited(attempt=attempt, node="a", exit={"class": "lost"})
    assert match == {"a": {"class": "ok"}, "b": {"class": "hang"}}


def test_attempts_on_a_node(run: Run, owner: User) -> None:
    node, other = factories.node(), factories.node()
    factories.external_run(owner)
    attempt = factories.running(run, node)
    assert (
        selectors.attempts_on(node=node.name) == [attempt]
        and selectors.attempts_on(node=other.name) == []
    )


@given(
    exit_class=some.sampled_from(ExitClass),
    requested=some.sampled_from(["", "cancel", "pause"]),
    attempt_requested=some.sampled_from(["", "cancel", "pause", "preempt", "checkpoint"]),
    used=some.dictionaries(
        some.sampled_from([str(item) for item in ExitClass]), some.integers(0, 20)
    ),
)
def test_every_exit_has_an_outcome_within_the_rules(
    exit_class: ExitClass, requested: str, attempt_requested: str, used: dict[str, int]
) -> None:
    match = outcome(
        exit_class=exit_class,
        exit={"reason": "r"},
        requested=requested,
        attempt_requested=attempt_requested,
        retries=Retries(),
        used=used,
    )
    assert match.why
    assert (match.exit is not None) == (match.state in states.ENDED)
    assert match.state in states.RUN_MOVES[RunState.STOPPING]
    if exit_class == ExitClass.OK:
        assert match.state == RunState.FINISHED
    elif requested:
        assert match.state == (RunState.CANCELLED if requested == "cancel" else RunState.PAUSED)
    elif exit_class == ExitClass.PREEMPTED:
        assert (match.state, match.budgets_used, match.wait_s) == (RunState.QUEUED, used, 0)
    if match.wait_s:
        assert match.state == RunState.QUEUED and 1 <= match.wait_s <= 300
        assert match.budgets_used[str(exit_class)] == used.get(str(exit_class), 0) + 1
        assert match.budgets_used[str(exit_class)] <= Retries().budget(str(exit_class))
