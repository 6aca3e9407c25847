"""Jobs run once per due time, under a lease, and again after failures with growing delays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.background_jobs import registry, running, services, worker
from orchestrator.background_jobs.models import Job, JobRun
from orchestrator.common.errors import Refusal
from orchestrator.dead_letters.models import DeadLetter
from tests import factories
from tests.conftest import FakeClock

ROOT = Path(__file__).resolve().parents[3]
_PROPERTIES = {
    "body_encoding": "base64",
    "delivery_tag": "1",
    "delivery_info": {"exchange": "", "routing_key": worker.QUEUE},
}
_MESSAGE = {
    "body": "%%%",
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": {"task": "jobs.tick", "id": "1", "lang": "py"},
    "properties": _PROPERTIES,
}
UNREADABLE: list[str | bytes] = [
    json.dumps(_MESSAGE),
    json.dumps({**_MESSAGE, "properties": {}}),
    json.dumps({**_MESSAGE, "properties": {**_PROPERTIES, "body_encoding": "unknown"}}),
    "not JSON",
    b"\xff\xfe",
    "[" * 100_000,
]


def fail(work: registry.Work) -> dict[str, int]:
    raise OSError("disk is full")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = registry.JobType("retention", 3600.0, fail)
    monkeypatch.setattr(running, "JOBS", {"retention": job})


@pytest.mark.django_db
def test_a_due_job_is_claimed_once(clock: FakeClock) -> None:
    assert set(running.due_jobs(now=clock.now())) == set(registry.JOBS)
    assert running.due_jobs(now=clock.now()) == []
    within_a_minute = {name for name, job in registry.JOBS.items() if job.period_s <= 60}
    assert set(running.due_jobs(now=clock.advance(61))) == within_a_minute
    assert set(running.due_jobs(now=clock.advance(3600))) == set(registry.JOBS)


@pytest.mark.django_db
def test_failures_are_recorded_and_delay_the_next_run(clock: FakeClock, failing: None) -> None:
    waits = []
    for _ in range(3):
        done = running.run_scheduled("retention")
        assert done is not None and done.state == "failed"
        assert done.error == "OSError: disk is full"
        waits.append((Job.objects.get().next_run - clock.now()).total_seconds())
    job = Job.objects.get()
    assert waits == [30, 60, 120]
    assert (job.fails, job.failed_total, job.ok_total, job.lease) == (3, 3, 0, "")
    assert [row.attempt for row in JobRun.objects.order_by("id")] == [1, 2, 3]


@pytest.mark.django_db
def test_a_run_in_progress_excludes_others_until_its_lease_ends(clock: FakeClock) -> None:
    Job.objects.create(name="retention", lease="other", lease_until=clock.now() + running.LEASE)
    row = JobRun.objects.create(
        name="retention", state="running", created=clock.now(), started=clock.now()
    )
    assert running.run_scheduled("retention") is None
    clock.advance(running.LEASE.total_seconds() + 1)
    assert running.close_abandoned(now=clock.now()) == 1
    row.refresh_from_db()
    assert row.state == "failed" and "worker ended" in row.error
    done = running.run_scheduled("retention")
    assert done is not None and done.state == "ok"


@pytest.mark.django_db
def test_a_run_that_lost_its_lease_stops(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(work: registry.Work) -> dict[str, int]:
        Job.objects.update(lease="other")
        work.renew()
        return {"rows": 1}

    job = registry.JobType("retention", 3600.0, overtaken)
    monkeypatch.setattr(running, "JOBS", {"retention": job})
    done = running.run_scheduled("retention")
    assert done is not None and done.error.startswith("LeaseLost")
    assert Job.objects.get().lease == "other"


@pytest.mark.django_db
def test_a_requested_run_starts_once_and_survives_a_lost_message(
    operator: User, clock: FakeClock
) -> None:
    row = services.job_request(name="retention", dry_run=True, by=operator)
    assert AuditEntry.objects.filter(action="job.run", actor=operator).exists()
    assert running.due_requests(now=clock.now()) == [row.pk]
    assert running.due_requests(now=clock.now()) == []
    assert running.due_requests(now=clock.now() + timedelta(seconds=61)) == [row.pk]
    done = running.run_requested(row.pk)
    assert done is not None and done.state == "ok" and done.dry_run
    assert running.run_requested(row.pk) is None
    assert not Job.objects.exclude(ok_total=0).exists()  # a dry run does not count


@pytest.mark.django_db
def test_requests_are_refused_with_a_reason(operator: User, owner: User) -> None:
    for name, by, status in (("retention", owner, 403), ("nothing", operator, 404)):
        with pytest.raises(Refusal) as refusal:
            services.job_request(name=name, dry_run=False, by=by)
        assert refusal.value.status == status
    for _ in range(services.MOST_QUEUED):
        services.job_request(name="retention", dry_run=False, by=operator)
    with pytest.raises(Refusal) as refusal:
        services.job_request(name="retention", dry_run=False, by=operator)
    assert refusal.value.status == 409


@pytest.mark.django_db
def test_operators_list_and_start_jobs_by_rest(operator: User, client: Any) -> None:
    api = factories.api(operator)
    names = [job["name"] for job in api.get("/api/v1/jobs").json()["items"]]
    assert names == list(registry.JOBS)
    answer = api.post(
        "/api/v1/jobs/retention/run", {"dry_run": True}, content_type="application/json"
    )
    assert answer.status_code == 201 and answer.json()["state"] == "queued"
    done = running.run_requested(int(answer.json()["id"]))
    assert done is not None
    (row,) = api.get("/api/v1/jobs/runs?name=retention").json()["items"]
    assert (row["state"], row["dry_run"], row["requested_by"]) == ("ok", True, "operator")
    assert 'orrery_job_runs_total{job="retention",result="ok"} 0' in (
        client.get("/metrics").content.decode()
    )


@pytest.mark.django_db
def test_operators_start_a_dry_run_on_the_page(operator: User, owner: User) -> None:
    page = factories.client_for(operator)
    assert page.post("/account/jobs/retention/run/", {"dry_run": "1"}).status_code == 302
    running.run_requested(JobRun.objects.get().pk)
    text = page.get("/account/jobs/").content.decode()
    assert "retention" in text and "dry run" in text
    assert factories.client_for(owner).get("/account/jobs/").status_code == 403


def test_queues_of_nodes_cannot_collide_with_ours() -> None:
    from workers.contracts.wire import names

    assert not worker.QUEUE.startswith(names.node_queue(""))


@pytest.mark.flow
@pytest.mark.django_db(transaction=True)
def test_the_worker_drops_unreadable_messages_runs_due_jobs_and_ends_by_signal(
    live_redis: str, settings: Any
) -> None:
    from django.db import connection

    if connection.vendor != "sqlite":
        pytest.skip("the worker's process reads the test's SQLite file")
    environ = {
        **os.environ,
        "REDIS_URL": live_redis,
        "DJANGO_SETTINGS_MODULE": "tests.orchestrator.background_jobs.worker_settings",
        "JOBS_TEST_DATABASE": str(connection.settings_dict["NAME"]),
    }
    with redis.Redis.from_url(live_redis) as client:
        for message in UNREADABLE:
            client.lpush(worker.QUEUE, message)
    process = subprocess.Popen([sys.executable, "manage.py", "jobs"], cwd=ROOT, env=environ)
    try:
        deadline = time.monotonic() + 60
        done = JobRun.objects.filter(name="retention", state="ok")  # others may be due as well
        while time.monotonic() < deadline and not done.exists():
            time.sleep(0.2)
        assert done.exists() and process.poll() is None
        letters = DeadLetter.objects.filter(source="jobs", state="open")
        assert len(letters) == len(UNREADABLE)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
