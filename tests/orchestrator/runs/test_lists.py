"""Lists: visibility, filters, pages, and a constant number of queries."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Experiment
from tests import factories


def test_teams_see_their_own_operators_see_all(people: factories.People) -> None:
    run = factories.run(people.owner)
    for person in (people.owner, people.teammate, people.operator, people.admin):
        assert selectors.run_get(user=person, id=str(run.pk)) == run
        assert selectors.run_list(user=person) == [run]
        assert selectors.state_counts(user=person) == {"queued": 1}
    assert (
        selectors.run_list(user=people.stranger) == []
        and selectors.state_counts(user=people.stranger) == {}
    )
    result = []
    for id in (run.pk, run.pk + 1, "nonsense", "9" * 30, -1):
        with pytest.raises(Refusal) as caught:
            selectors.run_get(user=people.stranger, id=id)
        result.append(caught.value.detail.replace(str(id), "N"))
        assert caught.value.status == 404
    assert len(set(result)) == 1, "what is hidden and what is not there look the same"


def test_filters_and_pages(owner: User, teammate: User) -> None:
    runs = [
        factories.run(owner, name="alpha", tags=["demo"]),
        factories.run(owner, name="beta", notes="after Alpha"),
        factories.run(teammate, name="gamma", model="llama-15m", tags=["alphabet", "demo"]),
        factories.external_run(owner, name="delta"),
    ]
    made = services.run_submit(owner=owner, name="last", spec=factories.spec(), experiment="Why?")
    _alpha, _beta, gamma, _delta = runs

    def names(**request: object) -> list[str]:
        return [run.name for run in selectors.run_list(user=owner, **request)]  # type: ignore[arg-type]

    assert names() == ["last", "delta", "gamma", "beta", "alpha"]
    assert names(limit=2) == ["last", "delta"]
    assert names(before_id=gamma.pk, limit=2) == ["beta", "alpha"]
    assert names(state="running") == ["delta"]
    assert names(state="running,queued", kind=["external", "script"]) == ["delta"]
    assert names(tag="demo") == ["gamma", "alpha"]
    assert names(owner="teammate") == ["gamma"] and names(owner="unknown") == []
    assert names(owner="me", kind="external") == ["delta"]
    assert names(q="alpha") == ["gamma", "beta", "alpha"]
    assert names(q="15M") == ["gamma"]
    assert names(experiment="Why?") == names(experiment=made.experiment_id) == ["last"]
    assert names(experiment="unheard of") == []


def test_an_id_is_no_name_of_another_experiment(owner: User) -> None:
    first = services.experiment_create(owner=owner, name="rates")
    run = services.run_submit(
        owner=owner, name="r", spec=factories.spec(), experiment=str(first.pk)
    )  # an experiment whose name is a number
    assert run.experiment is not None and run.experiment != first
    assert list(selectors.run_list(user=owner, experiment=first.pk)) == []
    assert list(selectors.run_list(user=owner, experiment=str(first.pk))) == [run]


def test_a_list_needs_a_constant_number_of_queries(owner: User) -> None:
    def request() -> int:
        with CaptureQueriesContext(connection) as queries:
            answers = [
                selectors.serialize_run(run) for run in selectors.run_list(user=owner, limit=50)
            ]
        assert answers
        return len(queries)

    factories.run(owner, tags=["a"])
    few = request()
    for _ in range(10):
        factories.run(owner, tags=["a", "b"])
    assert request() == few <= 4


def test_wait_reasons_are_written_and_published_once(owner: User) -> None:
    waiting, running = factories.run(owner), factories.external_run(owner)
    reasons = {waiting.pk: "8 devices wanted, 4 free", running.pk: "not asked"}
    head = live.head("fleet").seq
    assert services.wait_reasons_set(reasons=reasons) == 1
    assert services.wait_reasons_set(reasons=reasons) == 0
    assert live.head("fleet").seq == head + 1
    waiting.refresh_from_db()
    assert selectors.serialize_run(waiting)["wait_reason"] == "8 devices wanted, 4 free"
    services.run_cancel(run=waiting, by=owner)
    assert waiting.wait_reason == ""


def test_experiments_are_edited_by_their_owner(owner: User, teammate: User, stranger: User) -> None:
    made = services.experiment_create(owner=owner, name="Does warmup matter?", hypothesis="Yes.")
    assert selectors.experiment_get(user=teammate, id=made.pk) == made
    with pytest.raises(Refusal) as hidden:
        selectors.experiment_get(user=stranger, id=made.pk)
    assert hidden.value.status == 404
    with pytest.raises(Refusal) as forbidden:
        services.experiment_update(experiment=made, by=teammate, notes="mine")
    assert forbidden.value.status == 403
    services.experiment_update(experiment=made, by=owner, notes="It does.", pinned=["loss"])
    other = services.experiment_create(owner=owner, name="Another")
    for act in (
        lambda: services.experiment_create(owner=owner, name="Another"),
        lambda: services.experiment_update(experiment=other, by=owner, name="Does warmup matter?"),
    ):
        with pytest.raises(Refusal) as taken:
            act()
        assert taken.value.type == "name-taken"
    assert Experiment.objects.get(pk=made.pk).pinned == ["loss"]


def test_checkpoints_and_artifacts_are_recorded_once(owner: User) -> None:
    run = factories.run(owner)
    assert services.checkpoint_record(run=run, attempt=1, step=5, path="p", bytes=3) is not None
    assert services.checkpoint_record(run=run, attempt=1, step=5, path="p") is None
    assert services.checkpoint_deleted(run=run, step=5) == 1
    assert (
        not selectors.checkpoints_of(run=run).exists()
        and selectors.checkpoints_of(run=run, retained=False).exists()
    )
    assert services.checkpoint_record(run=run, attempt=1, step=5, path="again") is not None
    assert selectors.resume_point(run) == {"path": "again", "step": 5}
    services.artifact_record(run=run, name="answers.jsonl", path="a", bytes=1)
    services.artifact_record(run=run, name="answers.jsonl", path="b", bytes=2)
    assert [(item.path, item.bytes) for item in selectors.artifacts_of(run=run)] == [("b", 2)]


def test_rows_prune_checkpoints_as_training_does(owner: User) -> None:
    train = {"steps": 50, "seq_len": 64, "checkpoint": {"every_steps": 10, "keep": 2}}
    run = factories.run(owner, train=train)
    for step in (10, 20, 30):
        services.checkpoint_record(run=run, attempt=1, step=step, path=f"p/step-{step}")
    assert [item.step for item in selectors.checkpoints_of(run=run)] == [30, 20]
    late = services.checkpoint_record(run=run, attempt=1, step=15, path="p/step-15")
    assert late is not None and late.deleted is not None, "it was gone when its news came"
