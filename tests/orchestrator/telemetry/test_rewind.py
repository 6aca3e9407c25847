"""After a rewind, charts omit the discarded steps, unless an attempt is requested."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors, services
from tests import factories
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db


def store(run: Run, attempt: int, steps: range, loss: float) -> None:
    batch = PointBatch(
        run=str(run.pk),
        attempt=attempt,
        rank=0,
        seq=list(range(1, len(steps) + 1)),
        step=list(steps),
        tokens=list(steps),
        time=[float(step) for step in steps],
        values={"loss": [loss] * len(steps)},
    )
    services.points_store(run=run, attempt=attempt, batches=[batch])


def test_points_after_the_step_are_omitted(owner: User) -> None:
    run = factories.run(owner)
    store(run, 1, range(1, 101), 1.0)
    run.rewinds = [[1, 40]]
    run.save()
    assert selectors.series(run=run, name="loss").x == list(range(1, 41))
    store(run, 2, range(41, 61), 2.0)
    answer = selectors.series(run=run, name="loss")
    assert (answer.x, answer.y[39:41], answer.total_points) == (list(range(1, 61)), [1.0, 2.0], 60)
    raw = list(selectors.series_raw(run=run, name="loss"))
    assert [row[3] for row in raw] == list(range(1, 61)) and {row[0] for row in raw} == {1, 2}
    assert selectors.series(run=run, name="loss", attempt=1).x == list(range(1, 101))
