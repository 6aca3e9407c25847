"""Each policy deletes only what is old and ended; a dry run counts what a real run deletes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.sessions.models import Session

from orchestrator.accounts.models import AuditEntry
from orchestrator.background_jobs import retention
from orchestrator.background_jobs.models import JobRun, UsageDay
from orchestrator.common import clock, live
from orchestrator.common.models import Topic
from orchestrator.config.env.variables import Env
from orchestrator.dead_letters.models import DeadLetter, DeadLetterState
from orchestrator.dead_letters.services import dead_letter_add
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run, RunEvent

pytestmark = pytest.mark.django_db

DAYS = {
    f"retain_{name}_days": 30.0
    for name in (
        "events",
        "audit",
        "topics",
        "sessions",
        "jobs",
        "logs",
        "series",
        "usage",
        "programs",
        "device_minutes",
        "device_history",
    )
}


def retain(**options: Any) -> dict[str, int]:
    values = {"now": clock.now() + timedelta(days=31), "dry_run": False, "renew": lambda: None}
    values |= options
    return retention.retain(policies=retention.POLICIES, **values)


@pytest.fixture
def world(run: Run, django_capture_on_commit_callbacks: Any) -> Run:
    """One old row of each kind, below an ended run."""
    with django_capture_on_commit_callbacks(execute=True):  # numbers frames of the fleet
        for number in range(5):
            runs.event_record(run=run, type="note", data={"n": number})
        runs.external_finish(run=run, status="finished", reason="", by=run.owner)
    Session.objects.create(session_key="a" * 32, session_data="", expire_date=clock.now())
    JobRun.objects.create(name="retention", state="ok")
    JobRun.objects.create(name="retention", state="running")
    for state in DeadLetterState.values:
        letter = dead_letter_add(
            source="reports", node="n1", code="failed", reason="", message=state.encode()
        )
        assert letter is not None
        DeadLetter.objects.filter(pk=letter.pk).update(state=state)
    for final in (True, False):
        day = clock.now().date()
        UsageDay.objects.create(day=day, owner=1, pool=f"final {final}", final=final)
    return run


def test_a_dry_run_counts_what_a_run_deletes(
    world: Run, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ENV = Env(**DAYS)
    monkeypatch.setattr(retention, "BATCH", 2)  # several batches
    events, audit = RunEvent.objects.count(), AuditEntry.objects.count()
    now = clock.now() + timedelta(days=31)
    counted = retain(now=now, dry_run=True)
    assert RunEvent.objects.count() == events
    assert counted["events"] == events - 1 and counted["audit"] == audit
    assert (counted["topics"], counted["sessions"], counted["job_runs"]) == (1, 1, 1)
    assert (counted["dead_letters"], counted["usage"]) == (2, 1)
    assert retain(now=now) == counted
    assert DeadLetter.objects.get().state == DeadLetterState.OPEN
    assert not any(retain(now=now).values())
    assert not Topic.objects.filter(name=f"run:{world.pk}").exists()
    assert Topic.objects.filter(name="fleet").exists()


def test_numbers_of_events_and_frames_continue_after_retention(world: Run, settings: Any) -> None:
    settings.ENV = Env(**DAYS)
    newest = RunEvent.objects.filter(run=world).order_by("-seq")[0]
    epoch = live.head(f"run:{world.pk}").epoch
    retain()
    assert RunEvent.objects.get(run=world) == newest
    event = runs.event_record(run=world, type="note", data={})
    assert event is not None and event.seq == newest.seq + 1
    assert live.head(f"run:{world.pk}").epoch != epoch  # sockets take a new snapshot


def test_zero_days_retain_for_ever_and_active_runs_stay(run: Run, settings: Any) -> None:
    runs.event_record(run=run, type="note", data={})
    settings.ENV = Env(**DAYS)
    counts = retain(dry_run=True)
    assert (counts["events"], counts["topics"]) == (0, 0)
    settings.ENV = Env(**dict.fromkeys(DAYS, 0.0))
    assert retain() == {}


def test_the_lease_is_renewed_in_each_batch(
    world: Run, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ENV = Env(**DAYS)
    monkeypatch.setattr(retention, "BATCH", 2)
    renewed: list[int] = []
    retain(renew=lambda: renewed.append(1))
    assert len(renewed) >= 5
