"""Thinned series preserve their spikes; only data of ended runs is deleted."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from orchestrator.background_jobs import retention
from orchestrator.common import clock
from orchestrator.config.env.variables import Env
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors, services
from orchestrator.telemetry.services import Lines
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


def retained(now: datetime, *, dry_run: bool = False) -> dict[str, int]:
    policies = tuple(p for p in retention.POLICIES if p.name in ("logs", "series"))
    return retention.retain(policies=policies, now=now, dry_run=dry_run, renew=lambda: None)


def test_old_series_are_thinned_and_old_logs_deleted(run: Run, settings: object) -> None:
    settings.ENV = Env(retain_series_days=30, retain_logs_days=30)  # type: ignore[attr-defined]
    points = batch_of(run, range(1, 1025), loss=lambda step: 50.0 if step == 300 else 1.0)
    services.points_store(run=run, attempt=1, batches=[points])
    services.logs_store(run=run, attempt=1, batches=[(0, Lines(0, 1000.0, ["a line"]))])
    later = clock.now() + timedelta(days=31)
    assert not any(retained(later).values())  # the run has not ended
    runs.external_finish(run=run, status="finished", reason="", by=run.owner)
    assert retained(later, dry_run=True) == retained(later) == {"logs": 1, "series": 4}
    assert not any(retained(later).values())
    answer = selectors.series(run=run, name="loss")
    assert dict(zip(answer.x, answer.y, strict=True))[300] == 50.0
    assert (answer.x[0], answer.x[-1], answer.total_points) == (1, 1024, 1024)
    assert len(list(selectors.series_raw(run=run, name="loss"))) < 20
