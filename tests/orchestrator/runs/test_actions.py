"""User actions on runs, permissions, and actions in a wrong state."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Attempt, Run
from tests import factories


@pytest.fixture
def run(owner: User, clock: Any) -> Run:
    return factories.run(owner)


@pytest.fixture
def attempt(run: Run) -> Attempt:
    return factories.running(run, factories.node())


def refusal_of(action: Any, run: Run, by: User, **more: Any) -> Refusal:
    before = (run.state, run.requested, run.version)
    with pytest.raises(Refusal) as caught:
        action(run=run, by=by, **more)
    run.refresh_from_db()
    assert (run.state, run.requested, run.version) == before
    return caught.value


def test_a_waiting_run_is_cancelled_at_once(run: Run, owner: User) -> None:
    services.run_cancel(run=run, by=owner)
    assert (run.state, run.exit["class"], run.ended is not None) == ("cancelled", "cancelled", True)
    services.run_cancel(run=run, by=owner)
    assert AuditEntry.objects.filter(action="run.cancel").count() == 1
    assert services.attempt_create(run=run, placement=[]) is None


def test_a_running_run_stops_when_its_nodes_report_the_exit(
    run: Run, attempt: Attempt, owner: User
) -> None:
    services.run_cancel(run=run, by=owner)
    attempt.refresh_from_db()
    assert (run.state, run.requested, attempt.requested, attempt.state) == (
        "stopping",
        "cancel",
        "cancel",
        "running",
    )
    services.attempt_exited(attempt=attempt, exit_class="infrastructure", exit={"reason": "killed"})
    run.refresh_from_db()
    assert (run.state, run.exit["class"], run.requested) == ("cancelled", "cancelled", "")


def test_pause_and_resume_continue_from_the_newest_checkpoint(
    run: Run, attempt: Attempt, owner: User
) -> None:
    services.run_pause(run=run, by=owner)
    assert (run.state, run.requested) == ("stopping", "pause")
    for step in (10, 20):
        services.checkpoint_record(
            run=run, attempt=1, step=step, path=f"runs/1/checkpoints/step-{step}"
        )
    services.checkpoint_deleted(run=run, step=10)
    services.attempt_exited(
        attempt=attempt, exit_class="cancelled", exit={"reason": "left on request"}
    )
    run.refresh_from_db()
    assert (run.state, run.ended, run.exit) == ("paused", None, None)
    assert selectors.resume_point(run) == {"path": "runs/1/checkpoints/step-20", "step": 20}
    services.run_resume(run=run, by=owner)
    assert run.state == "queued"
    second = factories.running(run, factories.node())
    assert (second.number, second.fence != attempt.fence) == (2, True)


def test_a_waiting_run_is_paused(run: Run, owner: User) -> None:
    services.run_pause(run=run, by=owner)
    assert run.state == "paused"
    services.run_pause(run=run, by=owner)
    services.run_cancel(run=run, by=owner)
    assert run.state == "cancelled"


def test_a_pausing_run_may_still_be_cancelled(run: Run, attempt: Attempt, owner: User) -> None:
    services.run_pause(run=run, by=owner)
    services.run_cancel(run=run, by=owner)
    attempt.refresh_from_db()
    assert (run.requested, attempt.requested) == ("cancel", "cancel")
    assert refusal_of(services.run_pause, run, owner).status == 409


def test_a_failed_run_is_retried_with_fresh_budgets(
    run: Run, attempt: Attempt, owner: User
) -> None:
    assert refusal_of(services.run_retry, run, owner).type == "run-not-ended"
    Run.objects.filter(pk=run.pk).update(budgets_used={"numerics": 1})
    services.attempt_exited(
        attempt=attempt, exit_class="numerics", exit={"reason": "loss is NaN", "step": 7}
    )
    run.refresh_from_db()
    assert (
        run.state == "failed"
        and "its only retry is used up" in run.exit["reason"]
        and run.exit["step"] == 7
    )
    services.run_retry(run=run, by=owner)
    assert (run.state, run.budgets_used, run.exit, run.ended) == ("queued", {}, None, None)


@pytest.mark.parametrize("action", ["cancel", "pause", "resume", "retry"])
def test_a_finished_run_stays_finished(
    run: Run, attempt: Attempt, owner: User, action: str
) -> None:
    services.attempt_exited(attempt=attempt, exit_class="ok")
    run.refresh_from_db()
    assert refusal_of(getattr(services, f"run_{action}"), run, owner).status == 409


@pytest.mark.parametrize(
    "action",
    ["cancel", "pause", "resume", "retry", "checkpoint", "profile", "memory_snapshot", "update"],
)
def test_owners_and_operators_manage_others_read(
    run: Run, teammate: User, stranger: User, operator: User, action: str
) -> None:
    for person in (teammate, stranger):
        assert refusal_of(getattr(services, f"run_{action}"), run, person).status == 403
    assert services.may_manage(run, operator)
    services.run_cancel(run=run, by=operator)


@pytest.mark.parametrize(
    ("action", "requested"),
    [("checkpoint", "checkpoint"), ("profile", "profile"), ("memory_snapshot", "memory")],
)
def test_requests_to_running_training_are_stored_on_the_attempt(
    run: Run, owner: User, action: str, requested: str
) -> None:
    act = getattr(services, f"run_{action}")
    assert refusal_of(act, run, owner).status == 409
    attempt = factories.running(run, factories.node())
    act(run=run, by=owner)
    attempt.refresh_from_db()
    assert attempt.requested == requested
    assert refusal_of(act, run, owner).retry
    assert services.attempt_request_sent(attempt=attempt)
    act(run=run, by=owner)
    services.run_cancel(run=run, by=owner)
    attempt.refresh_from_db()
    assert attempt.requested == "cancel"
    assert not services.attempt_request_sent(attempt=attempt)


def test_edits_meet_by_version(run: Run, owner: User) -> None:
    services.run_update(
        run=run, by=owner, priority=5, tags=["b", "a", "b"], notes="*fast*", version=1
    )
    shown = selectors.serialize_run(selectors.run_get(user=owner, id=run.pk))
    assert (shown["priority"], shown["tags"], shown["notes"], shown["version"]) == (
        5,
        ["a", "b"],
        "*fast*",
        2,
    )
    late = refusal_of(services.run_update, run, owner, tags=["c"], version=1)
    assert (late.status, late.type) == (412, "version-conflict")
    services.run_update(run=run, by=owner, tags=["a", "c"])
    shown = selectors.serialize_run(selectors.run_get(user=owner, id=run.pk))
    assert (shown["tags"], shown["notes"], shown["version"]) == (["a", "c"], "*fast*", 3)
    for wrong in ({"tags": [""]}, {"priority": 10**7}, {"notes": "x" * 20_001}):
        assert refusal_of(services.run_update, run, owner, **wrong).status == 422


def test_a_clone_is_a_new_run_of_the_user_who_clones(run: Run, teammate: User) -> None:
    made = services.run_clone(
        run=run, by=teammate, changes={"train": {"steps": 99}, "plan": {"micro_batch_size": None}}
    )
    assert (made.owner, made.state, made.name) == (teammate, "queued", f"{run.name} copy")
    assert made.spec["train"] == {"steps": 99, "seq_len": 64}
    assert made.plan["micro_batch_size"] == 1 and run.plan["micro_batch_size"] == 2
    with pytest.raises(Refusal):
        services.run_clone(run=run, by=teammate, changes={"train": {"steps": -1}})


def test_an_external_run_starts_running_and_is_reported_finished(
    owner: User, clock: Any, settings: Any
) -> None:
    run = factories.external_run(owner)
    assert (run.state, run.attempt_number, run.devices, run.plan) == ("running", 1, 0, None)
    for action in (services.run_pause, services.run_retry, services.run_checkpoint):
        assert refusal_of(action, run, owner).status == 409
    with pytest.raises(Refusal):
        services.external_finish(run=run, status="done", by=owner)
    clock.advance(settings.ENV.external_silent_s + 1)
    assert list(selectors.external_silent()) == [run]
    services.event_record(run=run, type="note", data={}, attempt=1, origin="1/0/1")
    assert not selectors.external_silent().exists()
    services.external_finish(run=run, status="failed", reason="CUDA error", by=owner)
    services.external_finish(run=run, status="failed", reason="again", by=owner)
    assert (run.state, run.exit) == ("failed", {"class": "user_error", "reason": "CUDA error"})
    assert selectors.attempts_of(run=run).get().state == "exited"
    with pytest.raises(Refusal):
        services.external_finish(run=run, status="finished", by=owner)
    mine = factories.run(owner)
    assert (
        refusal_of(services.external_finish, mine, owner, status="finished").type == "not-external"
    )


def test_an_external_run_may_be_cancelled(owner: User) -> None:
    run = factories.external_run(owner)
    services.run_cancel(run=run, by=owner)
    assert run.state == "cancelled"


def test_a_submitter_has_a_smaller_range_of_priorities(owner: User, operator: User) -> None:
    run = factories.run(owner)
    for wrong in (101, -101, 1_000_000):
        with pytest.raises(Refusal) as refused:
            services.run_update(run=run, by=owner, priority=wrong)
        assert "from -100 to 100" in str(vars(refused.value))
        with pytest.raises(Refusal):
            factories.run(owner, priority=wrong)
    services.run_update(run=run, by=owner, priority=100)
    services.run_update(run=run, by=operator, priority=1_000_000)
    run.refresh_from_db()
    assert run.priority == 1_000_000
