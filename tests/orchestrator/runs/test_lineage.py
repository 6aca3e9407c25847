"""Forks with a changed spec and their own checkpoint, rewinds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Attempt, Run
from tests import factories


@pytest.fixture
def run(owner: User, clock: Any) -> Run:
    """A running training of 200 steps with checkpoints at 100 and 150."""
    made = factories.run(owner, train={"steps": 200, "seq_len": 64})
    factories.running(made, factories.node())
    for step in (100, 150):
        saved = f"runs/{made.pk}/checkpoints/step-{step:08d}"
        services.checkpoint_record(
            run=made, attempt=1, step=step, path=saved, tokens=step * 8, bytes=4
        )
    made.refresh_from_db()
    return made


def refused(action: Any, **request: Any) -> dict[str, str]:
    before = Run.objects.count()
    with pytest.raises(Refusal) as caught:
        action(**request)
    assert Run.objects.count() == before
    return caught.value.errors[0] if caught.value.errors else {"message": caught.value.detail}


def test_a_fork_has_a_checkpoint_of_its_own(run: Run, owner: User) -> None:
    plan = {"dp": 2, "zero": 3, "global_batch_size": 16, "micro_batch_size": 4}
    fork = services.run_fork(
        run=run, by=owner, step=100, changes={"train": {"steps": 400}, "plan": plan}
    )
    own = f"runs/{fork.pk}/checkpoints/step-00000100"
    assert (fork.forked_from, selectors.resume_point(fork)) == (run, {"path": own, "step": 100})
    assert (fork.spec["train"]["steps"], fork.plan["zero"], fork.devices) == (400, 3, 2), (
        "and may run otherwise"
    )
    assert [event.type for event in selectors.events_of(run=fork)] == [
        "state_changed",
        "plan_resolved",
        "forked",
    ]
    [result] = [event.data for event in selectors.events_of(run=run) if event.type == "forked"]
    assert result["into"] == str(fork.pk) and result["step"] == 100
    assert selectors.forks_of(run=run, user=owner) == [{"run": fork, "step": 100}]
    assert selectors.forked_at(fork) == 100
    services.checkpoint_deleted(run=run, step=100)
    assert selectors.resume_point(fork) == {"path": own, "step": 100}, (
        "whatever becomes of the parent's"
    )


@pytest.mark.parametrize(
    ("step", "changes", "field", "message"),
    [
        (140, {}, "step", "no retained checkpoint of step 140; there are 100, 150"),
        (100, {"model": "llama-15m"}, "model", "cannot change the model"),
        (100, {"train": {"seq_len": 32}}, "train.seq_len", "was written with"),
        (100, {"train": {"seed": 9}}, "train.seed", "written with 0"),
        (
            100,
            {"train": {"optimizer": {"name": "sgd"}}},
            "train.optimizer.name",
            "written with adamw",
        ),
        (150, {"train": {"steps": 120}}, "train.steps", "all 120 steps are done by step 150"),
        (100, {"train": {"stepz": 1}}, "train.stepz", ""),
    ],
    ids=str,
)
def test_incompatible_forks_are_refused(
    run: Run, owner: User, step: int, changes: dict[str, Any], field: str, message: str
) -> None:
    result = refused(services.run_fork, run=run, by=owner, step=step, changes=changes)
    assert result["field"] == field and message in result["message"]


def test_a_rewound_run_continues_from_the_step_and_discards_later_ones(
    run: Run, owner: User, stranger: User
) -> None:
    assert (
        "pause or cancel it first"
        in refused(services.run_rewind, run=run, by=owner, step=100)["message"]
    )
    attempt = Attempt.objects.get(run=run)
    services.attempt_exited(attempt=attempt, exit_class="ok", exit={"reason": "all steps done"})
    run.refresh_from_db()
    assert run.state == "finished"
    assert (
        "there are 100, 150" in refused(services.run_rewind, run=run, by=owner, step=120)["message"]
    )
    refused(services.run_rewind, run=run, by=stranger, step=100)
    services.run_rewind(run=run, by=owner, step=100)
    assert (run.state, run.ended, run.exit, run.rewinds) == ("queued", None, None, [[1, 100]])
    point = selectors.resume_point(run)
    assert point is not None and point["step"] == 100
    assert [each.step for each in selectors.checkpoints_of(run=run)] == [100]
    [result] = [event.data for event in selectors.events_of(run=run) if event.type == "rewound"]
    assert (result["step"], result["given_up"], result["by"]) == (100, [150], owner.username)
