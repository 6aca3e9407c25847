"""Jobs of runs that are cancelled or paused while the job waits in its engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from orchestrator.accounts.models import User
from orchestrator.fleet.cluster_engines import members
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import EngineMember
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.scheduling import services
from orchestrator.scheduling.cluster_engines.interface import (
    Capacity,
    EngineUnavailable,
    JobView,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.sync import sync
from orchestrator.scheduling.models import EngineJob
from orchestrator.scheduling.reports import attempt_end
from tests.orchestrator.scheduling.conftest import Broker
from tests.orchestrator.scheduling.recorded_engine import Recorded, one_pass
from workers.contracts.wire import envelope, names

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


def requested(broker: Broker) -> str | None:
    """The action that the job's supervisor reads."""
    member = EngineMember.objects.get()
    text = broker.client.get(names.node_key(member.name, names.ENGINE_REQUEST))
    if text is None:
        return None
    assert isinstance(text, bytes)
    body = envelope.open_envelope(
        members.member_secret(member), text, kind=names.KIND_CONTROL, now=time.time()
    )
    return str(body["action"])


@pytest.mark.parametrize("stop", [runs.run_cancel, runs.run_pause])
def test_a_job_that_starts_just_after_its_run_was_stopped_is_stopped(
    broker: Broker, engine: EngineRow, run: Run, stop: Callable[..., Run]
) -> None:
    """Its supervisor reads the request when it starts, before the engine's next pass."""
    attempt = one_pass(engine, Recorded(), run)
    services.reap()
    assert attempt is not None and requested(broker) is None
    stop(run=run, by=User.objects.get(pk=run.owner_id))
    services.reap()
    attempt.refresh_from_db()
    assert (attempt.state, attempt.requested) == ("assigned", "")
    assert requested(broker) == "cancel"


@pytest.mark.parametrize(
    ("stop", "again"), [(runs.run_cancel, runs.run_retry), (runs.run_pause, runs.run_resume)]
)
@pytest.mark.parametrize("reported", ["", "preempted", "cancelled"])
def test_the_end_of_a_stopped_job_does_not_end_the_run_that_was_queued_again(
    engine: EngineRow,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[..., Run],
    again: Callable[..., Run],
    reported: str,
) -> None:
    """`reported`: the exit class of its supervisor, if the job had just started."""
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    port = Recorded()
    first = one_pass(engine, port, run)
    assert first is not None
    owner = User.objects.get(pk=run.owner_id)
    stop(run=run, by=owner)
    one_pass(engine, port, run)
    assert port.cancelled == {"1"}
    again(run=run, by=owner)
    if reported:
        attempt_end.node_exited(
            first, node=first.placement[0]["node"], report={"class": reported, "reason": "SIGTERM"}
        )
    port.become(run, "CANCELLED")
    second = one_pass(engine, port, run, times=2)
    first.refresh_from_db()
    assert (first.state, first.exit_class, first.exit["cause"]) == (
        "exited",
        "cancelled",
        "run_stopped",
    )
    assert run.state == "queued" and run.budgets_used == {} and run.not_before is None
    assert second is not None and second.number == 2 and len(port.orders) == 2
    port.become(run, "RUNNING")
    one_pass(engine, port, run)
    assert EngineJob.objects.get(attempt=second).state == "active"


def test_a_job_that_vanished_after_its_stop_is_replaced(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not submitted again as it was, because Orrery would stop it again."""
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.MISSING", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    owner = User.objects.get(pk=run.owner_id)
    runs.run_cancel(run=run, by=owner)
    one_pass(engine, port, run)
    runs.run_retry(run=run, by=owner)
    port.jobs.clear()
    second = one_pass(engine, port, run, times=2)
    assert second is not None and second.number == 2 and run.state == "queued"
    assert len({order.name for order in port.orders}) == 2


def test_a_job_cancelled_by_its_clusters_users_ends_the_run(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    port.become(run, "CANCELLED")
    attempt = one_pass(engine, port, run, times=2)
    assert attempt is not None and attempt.number == 1 and "cause" not in attempt.exit
    assert run.state == "cancelled"


class Slow(Recorded):
    """An engine whose listing answers, but not the named calls."""

    def __init__(self, *silent: str) -> None:
        super().__init__()
        self.silent = silent

    def _answer(self, call: str) -> None:
        if call in self.silent:
            raise EngineUnavailable(f"{call} did not answer within 15 s")

    def capacity(self) -> Capacity:
        self._answer("capacity")
        return super().capacity()

    def lookup(self, *, number: str, name: str) -> JobView | None:
        self._answer("lookup")
        return super().lookup(number=number, name=name)


@pytest.mark.parametrize("silent", ["capacity", "lookup"])
def test_a_stop_does_not_wait_for_calls_that_time_out(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.MISSING", timedelta())
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.contact.REFRESH_S", 0.0)
    owner = User.objects.get(pk=run.owner_id)
    other = runs.run_submit(owner=owner, name="other", spec=run.spec)
    port = Slow()
    one_pass(engine, port, run)
    stopped = EngineJob.objects.get(attempt__run=run).number
    del port.jobs[EngineJob.objects.get(attempt__run=other).name]
    runs.run_cancel(run=run, by=owner)
    port.silent = (silent,)
    one_pass(engine, port, run)
    assert port.cancelled == {stopped}
    engine.refresh_from_db()
    assert engine.status["down"], "it did not answer"


@pytest.mark.parametrize("failure", [SubmissionUnclear, EngineUnavailable])
def test_submissions_end_at_the_first_without_an_answer(
    engine: EngineRow, run: Run, failure: type[Exception]
) -> None:
    """Each of the others would wait for the time limit too, and no job be stopped meanwhile."""
    owner = User.objects.get(pk=run.owner_id)
    for number in range(3):
        runs.run_submit(owner=owner, name=f"more {number}", spec=run.spec)
    port = Recorded()
    port.failure, port.accepts = failure("sbatch did not answer within 15 s"), False
    one_pass(engine, port, run)
    assert len(port.orders) == 1
    port.failure, port.accepts = None, True
    one_pass(engine, port, run)
    assert len(port.orders) == 4, "the first waits, because it may still arrive"


def test_a_job_that_cannot_be_submitted_does_not_hold_up_the_others(
    engine: EngineRow, run: Run
) -> None:
    runs.run_submit(owner=User.objects.get(pk=run.owner_id), name="other", spec=run.spec)
    port = Recorded()
    port.failure, port.accepts = KeyError("metadata"), False
    one_pass(engine, port, run)
    assert len(port.orders) == 2


def test_a_stop_that_is_requested_during_a_pass_is_not_lost(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(row: EngineRow) -> dict[str, str]:
        EngineJob.objects.update(stop=True)
        return {}

    port = Recorded()
    one_pass(engine, port, run)
    port.become(run, "RUNNING")
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.contact.addresses", stop)
    one_pass(engine, port, run)
    job = EngineJob.objects.get()
    assert job.stop and job.state == "active" and port.cancelled == {"1"}


def test_a_pass_ends_after_the_current_job_when_its_process_stops(
    engine: EngineRow, run: Run
) -> None:
    for number in range(3):
        runs.run_submit(owner=run.owner, name=f"more {number}", spec=run.spec)
    port = Recorded()
    sync(engine, port, stopping=lambda: bool(port.orders))
    assert len(port.orders) == 1
    sync(EngineRow.objects.get(), port)
    assert len(port.orders) == 4
