"""Passes over an engine that loses answers and jobs: nothing starts twice, nothing is lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from orchestrator.background_jobs import garbage
from orchestrator.common import clock
from orchestrator.common.redis import quick_client
from orchestrator.fleet.cluster_engines import members
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine as EngineRow
from orchestrator.fleet.models import EngineMember, Pool
from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Deletion, Run
from orchestrator.scheduling import selectors
from orchestrator.scheduling.accounting import held, recorded
from orchestrator.scheduling.accounting.split import split
from orchestrator.scheduling.cluster_engines import ends, homes
from orchestrator.scheduling.cluster_engines import sync as sync_module
from orchestrator.scheduling.cluster_engines.interface import (
    Order,
    SubmissionRefused,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.sync import sync
from orchestrator.scheduling.models import EngineJob
from orchestrator.scheduling.reports import attempt_end
from orchestrator.scheduling.reports.handler import report
from tests import factories
from tests.orchestrator.scheduling.recorded_engine import Recorded, one_pass
from workers.contracts.wire import envelope, names
from workers.contracts.wire.maintenance.storage import CollectOrder

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("broker")]


def test_a_run_stays_queued_with_the_engines_reason(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    one_pass(engine, port, run, times=3)
    assert len(port.orders) == 1 and run.state == "queued"
    (entry,) = selectors.queue_visible_to(user=run.owner)
    assert entry.reason == "Job 1 waits: Resources."


def test_a_lost_answer_is_looked_up_before_another_submission(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    port.failure = SubmissionUnclear("Socket timed out")
    one_pass(engine, port, run, times=3)
    assert len(port.orders) == 1
    assert EngineJob.objects.get().number == "1"


def test_a_submission_that_did_not_arrive_is_repeated(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = Recorded()
    port.failure, port.accepts = SubmissionUnclear("Socket timed out"), False
    one_pass(engine, port, run, times=2)
    assert len(port.orders) == 1  # it may still arrive
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.UNCLEAR", timedelta())
    port.failure, port.accepts = None, True
    one_pass(engine, port, run)
    assert [order.name for order in port.orders] == [port.orders[0].name] * 2


def test_a_submission_that_timed_out_may_arrive_after_its_time_limit(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, waited = clock.now(), [timedelta()]
    monkeypatch.setattr(clock, "now", lambda: began + waited[0])

    class Waiting(Recorded):
        def submit(self, order: Order) -> str:
            waited[0] += timedelta(seconds=15)
            return super().submit(order)

    port = Waiting()
    port.failure, port.accepts = SubmissionUnclear("sbatch did not answer within 15 s"), False
    one_pass(engine, port, run, times=2)
    assert len(port.orders) == 1
    waited[0] += timedelta(seconds=11)
    one_pass(engine, port, run)
    assert len(port.orders) == 2


def test_a_refused_job_fails_the_run_with_what_to_change(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    port.failure, port.accepts = SubmissionRefused("Invalid account", "Correct `account`."), False
    attempt = one_pass(engine, port, run)
    assert attempt is not None and attempt.exit_class == "user_error"
    assert run.state == "failed" and "Correct `account`." in run.exit["reason"]


def test_a_job_that_the_engine_lost_before_its_start_is_submitted_again(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.MISSING", timedelta())
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.UNCLEAR", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    port.jobs.clear()
    one_pass(engine, port, run, times=2)
    assert len(port.orders) == 2 and Attempt.objects.count() == 1


def test_nothing_is_concluded_while_the_engine_is_down(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    one_pass(engine, port, run)
    port.down = True
    attempt = one_pass(engine, port, run, times=2)
    assert attempt is not None and attempt.state == "assigned" and run.state == "queued"
    assert "does not answer" in run.wait_reason


@pytest.mark.parametrize(
    ("state", "run_state", "exit_class"),
    [
        ("CANCELLED", "cancelled", "cancelled"),
        ("TIMEOUT", "failed", "user_error"),
        ("PREEMPTED", "queued", "preempted"),
        ("NODE_FAIL", "queued", "lost"),
        ("FAILED", "queued", "infrastructure"),
    ],
)
def test_a_job_that_ends_without_a_report_ends_by_the_engines_verdict(
    engine: EngineRow,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    run_state: str,
    exit_class: str,
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    port.become(run, "RUNNING")
    one_pass(engine, port, run)
    port.become(run, state)
    one_pass(engine, port, run)
    assert run.state == run_state
    assert Attempt.objects.get(run=run, number=1).exit_class == exit_class


def test_a_requeued_job_is_cancelled_and_replaced(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    port.become(run, "RUNNING")
    one_pass(engine, port, run)
    port.become(run, "PENDING", "BeginTime")
    attempt = one_pass(engine, port, run, times=2)
    assert attempt is not None and attempt.number == 2 and len(port.orders) == 2
    assert port.cancelled == {"1"}


def test_a_run_cancelled_while_its_job_waits_ends_the_job(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.PATIENCE", timedelta())
    port = Recorded()
    one_pass(engine, port, run)
    runs.run_cancel(run=run, by=run.owner)
    one_pass(engine, port, run)
    assert port.cancelled == {"1"} and run.state == "cancelled"
    port.become(run, "CANCELLED")
    attempt = one_pass(engine, port, run, times=2)
    assert attempt is not None and attempt.number == 1
    assert attempt.exit["reason"] == (
        "Orrery cancelled job 1, because its run was cancelled or paused while it waited."
    )


@pytest.mark.parametrize(
    ("requested", "what"), [("preempt", "preempted"), ("cancel", "cancelled"), ("pause", "paused")]
)
def test_the_end_of_a_stopped_job_names_the_request(
    engine: EngineRow, run: Run, requested: str, what: str
) -> None:
    attempt = one_pass(engine, Recorded(), run)
    assert attempt is not None
    attempt.requested = requested
    job = EngineJob(attempt=attempt, engine=engine, number="1", engine_state="CANCELLED")
    job.stop_sent = clock.now()
    assert ends.reason(job) == f"Orrery cancelled job 1, because its run was {what}."


def test_a_run_cancelled_before_its_submission_has_no_job_to_blame(
    engine: EngineRow, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.scheduling.cluster_engines.sync.UNCLEAR", timedelta())
    port = Recorded()
    port.failure, port.accepts = SubmissionUnclear("Socket timed out"), False
    one_pass(engine, port, run)
    runs.run_cancel(run=run, by=run.owner)
    attempt = one_pass(engine, port, run, times=2)
    assert attempt is not None and attempt.state == "exited" and len(port.orders) == 1
    assert attempt.exit["reason"] == "The run was cancelled or paused before its job was submitted."


def test_a_pass_without_changes_writes_nothing(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    one_pass(engine, port, run)
    port.become(run, "RUNNING")
    one_pass(engine, port, run, times=2)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        sync(EngineRow.objects.get(pk=engine.pk), port)
    written = [q["sql"] for q in queries if q["sql"].startswith(("UPDATE", "INSERT"))]
    assert written == []


def test_time_in_the_engines_queue_is_no_device_time(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    attempt = one_pass(engine, port, run)
    assert attempt is not None
    now = clock.now()
    Attempt.objects.filter(pk=attempt.pk).update(
        created=now - timedelta(hours=5), launched=now - timedelta(seconds=60)
    )
    attempt.refresh_from_db()
    runs.attempt_exited(attempt=attempt, exit_class="cancelled", exit={"reason": "x"})
    attempt.refresh_from_db()
    assert 59 <= split(recorded.read(attempt)).allocated <= 70


def test_a_quota_limits_what_a_user_has_submitted(engine: EngineRow, run: Run) -> None:
    Pool.objects.filter(name="hpc-low").update(max_devices_per_user=1)
    second = runs.run_submit(owner=run.owner, name="second", spec=run.spec)
    other = runs.run_submit(
        owner=factories.user("bob", role="submitter"), name="other", spec=run.spec
    )
    port = Recorded()
    one_pass(engine, port, run, times=2)
    assert {order.run for order in port.orders} == {run.pk, other.pk}
    second.refresh_from_db()
    assert "allows ada 1 at a time and 1 are in use" in second.wait_reason


def test_usage_counts_devices_of_jobs_from_their_start(engine: EngineRow, run: Run) -> None:
    attempt = one_pass(engine, Recorded(), run)
    assert attempt is not None
    now = clock.now()
    window = {"since": now - timedelta(hours=1), "until": now}
    assert list(held.held_devices(**window)) == []  # it waits
    Attempt.objects.filter(pk=attempt.pk).update(launched=now - timedelta(minutes=10))
    [item] = held.held_devices(**window)
    assert (item.username, item.pool) == ("ada", "hpc-low") and item.seconds == 600
    assert held.first_allocation(now.date()) == (now - timedelta(minutes=10)).date()


def test_credentials_are_encrypted_again_after_a_new_secret_key(
    engine: EngineRow, settings: Any
) -> None:
    old = settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "a new key " * 5, [old]
    assert engines.secrets_renew(dry_run=True) == 1
    assert engines.secrets_renew(dry_run=False) == 1
    assert engines.secrets_renew(dry_run=False) == 0
    settings.SECRET_KEY_FALLBACKS = []
    assert engines.redis_url(EngineRow.objects.get()) == settings.REDIS_URL


def test_a_new_job_sends_what_killed_supervisors_left_and_deletes_garbage(
    engine: EngineRow, run: Run, settings: Any
) -> None:
    port = Recorded()
    first = one_pass(engine, port, run)
    assert first is not None
    assert homes.tasks(engine, first)["collect"] is None  # the published order has the scan
    quick_client().delete(f"orrery:engine:{engine.pk}:scan")
    assert homes.tasks(engine, first)["collect"] == CollectOrder(scan=True)
    port.become(run, "RUNNING")
    one_pass(engine, port, run)
    port.become(run, "NODE_FAIL")
    first.refresh_from_db()
    attempt_end.abandon(first, exit_class="user_error", reason="its node failed")
    run.refresh_from_db()
    assert run.state == "failed"
    settings.ENV = settings.ENV.model_copy(update={"gc_folder_days": 1.0})
    Run.objects.filter(pk=run.pk).update(ended=clock.now() - timedelta(days=2))
    counts = garbage.collect_garbage(dry_run=False, renew=lambda: None)
    assert counts["attempt_folders"] == 1
    deletion = Deletion.objects.get()
    assert (deletion.node, deletion.done) == ("engine:hpc", None)

    second = runs.run_submit(owner=run.owner, name="second", spec=run.spec)
    attempt = one_pass(engine, port, second)
    assert attempt is not None
    # claimed by the order that was published
    assert homes.tasks(engine, attempt)["collect"] is None
    Deletion.objects.update(ordered=None)
    tasks = homes.tasks(engine, attempt)
    folder = f"runs/{run.pk}/attempt-1"
    assert tasks["collect"].attempts == [folder] and tasks["collect"].scan
    [left] = tasks["left"]
    assert left.to_dict() == {"node": f"hpc.job{first.pk}.0", "run_dir": f"{folder}/node-0"}
    # while its job lives, a supervisor that has reported its exit still sends the rest itself
    EngineJob.objects.filter(attempt=first).update(state=EngineJob.State.ACTIVE)
    assert homes.tasks(engine, attempt)["left"] == []
    EngineJob.objects.filter(attempt=first).update(state=EngineJob.State.ENDED)

    # with homes of their own, users delete and send only what is theirs
    EngineRow.objects.filter(pk=engine.pk).update(settings={"identity": "submitter"})
    row = EngineRow.objects.get(pk=engine.pk)
    Deletion.objects.update(ordered=None)
    other = factories.user("bob", role="submitter")
    theirs = runs.run_submit(owner=other, name="theirs", spec=run.spec)
    stranger = one_pass(row, port, theirs)
    assert stranger is not None
    assert homes.tasks(row, stranger) == {"left": [], "collect": None}
    assert homes.tasks(row, attempt)["collect"] is not None

    member = EngineMember.objects.get(attempt_id=attempt.pk)
    body = {"collected": [{"path": folder, "bytes": 7}]}
    text = envelope.seal(
        members.member_secret(member),
        names.KIND_COLLECTED,
        body,
        ttl_s=60,
        now=clock.now().timestamp(),
        node=member.name,
    )
    assert report(text)
    deletion.refresh_from_db()
    assert deletion.done is not None and deletion.freed == 7


def test_running_jobs_without_news_are_not_loaded(engine: EngineRow, run: Run) -> None:
    port = Recorded()
    attempt = one_pass(engine, port, run)
    assert sync_module._unchanged(engine, port.watch()) == set()  # it waits
    port.become(run, "RUNNING")
    assert sync_module._unchanged(engine, port.watch()) == set()  # news
    one_pass(engine, port, run)
    job = EngineJob.objects.get()
    assert sync_module._unchanged(engine, port.watch()) == {job.pk}
    assert sync_module._open_jobs(engine, without={job.pk}) == []
    assert sync_module._unchanged(engine, {}) == set()
    assert attempt is not None
    runs.run_cancel(run=run, by=run.owner)
    Attempt.objects.filter(pk=attempt.pk).update(number=7)  # the run has another attempt
    assert sync_module._unchanged(engine, port.watch()) == set()
