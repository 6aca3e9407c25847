"""`series_of_runs` answers as `series` does for each run, in a number of queries that stays."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from django.test.utils import CaptureQueriesContext

from orchestrator.accounts.models import User
from orchestrator.telemetry import selectors, services
from orchestrator.telemetry.models import Chunk
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


def test_curves_of_many_runs_equal_those_of_each(owner: User) -> None:
    short, long, several, bare, thinned = runs = [factories.external_run(owner) for _ in range(5)]

    def store(run: Any, steps: range, **more: int) -> None:
        batch = batch_of(run, steps, **more)
        services.points_store(run=run, attempt=more.get("attempt", 1), batches=[batch])

    store(short, range(1, 100))
    store(long, range(1, 3001))
    store(several, range(1, 900), rank=1)
    store(several, range(1, 700), rank=0)
    store(several, range(500, 1200), attempt=2)
    store(thinned, range(1, 1025))
    Chunk.objects.filter(series__run=thinned, index__lt=2).update(data=b"")  # as retention does
    axes: tuple[Literal["step", "time", "tokens"], ...] = ("step", "time", "tokens")
    for axis in axes:
        for points in (200, 5000):
            together = selectors.series_of_runs(runs=runs, name="loss", x=axis, points=points)
            assert together == {
                run.pk: selectors.series(run=run, name="loss", x=axis, points=points)
                for run in runs
            }
    assert together[bare.pk].x == []


def test_more_runs_need_no_more_queries(owner: User) -> None:
    from django.db import connection

    runs = [factories.external_run(owner) for _ in range(12)]
    for run in runs:
        services.points_store(run=run, attempt=1, batches=[batch_of(run, range(1, 600))])
    counts = []
    for some in (runs[:2], runs):
        with CaptureQueriesContext(connection) as queries:
            selectors.series_of_runs(runs=some, name="loss")
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 4
