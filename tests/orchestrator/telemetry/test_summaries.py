"""Metric summaries of the runs table: exact over chunks and tails, current after new points."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from orchestrator.runs.models import Run
from orchestrator.telemetry import services
from orchestrator.telemetry.models import MetricName, MetricSummary, StaleSummary
from tests.orchestrator.telemetry.conftest import batch_of
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db


def summary(run: Run, name: str) -> tuple[float | None, ...]:
    row = MetricSummary.objects.get(run=run, name=name)
    return row.last, row.min, row.max, row.mean, row.points


def test_a_summary_counts_chunks_and_the_tail(run: Run, batch: Callable[..., PointBatch]) -> None:
    steps = range(1, 601)  # two chunks of 256 and a tail
    services.points_store(
        run=run, attempt=1, batches=[batch(steps, loss=lambda step: 600.0 - step)]
    )
    assert services.summaries_refresh() == 0, "the first points wait a few seconds"
    assert services.summaries_refresh(wait=False) == 1
    assert summary(run, "loss") == (0.0, 0.0, 599.0, pytest.approx(299.5), 600)
    assert not StaleSummary.objects.exists()
    assert list(MetricName.objects.values_list("owner", "name")) == [(run.owner_id, "loss")]
    services.points_store(
        run=run, attempt=1, batches=[batch([601], loss=lambda step: -5.0, custom=lambda step: 1.0)]
    )
    assert services.summaries_refresh(wait=False) == 1
    assert summary(run, "loss")[:3] == (-5.0, -5.0, 599.0)
    assert summary(run, "custom") == (1.0, 1.0, 1.0, 1.0, 1)


def test_the_median_of_a_tail_is_exact_and_that_of_chunks_is_near(
    run: Run, batch: Callable[..., PointBatch]
) -> None:
    values = {step: 1000.0 if step == 1 else float(step) for step in range(1, 5)}
    services.points_store(run=run, attempt=1, batches=[batch(values, speed=values.__getitem__)])
    services.summaries_refresh(wait=False)
    assert MetricSummary.objects.get(run=run, name="speed").median == 3.5
    steps = range(5, 601)
    points = batch(steps, speed=lambda step: 100.0 + step % 2)
    services.points_store(run=run, attempt=1, batches=[points])
    services.summaries_refresh(wait=False)
    assert MetricSummary.objects.get(run=run, name="speed").median == pytest.approx(100.5, abs=0.6)


def test_numbers_that_are_not_finite_are_left_out(run: Run) -> None:
    values = {1: 2.0, 2: math.nan, 3: 4.0, 4: math.inf}
    points = batch_of(run, values, loss=lambda step: values[step], broken=lambda step: math.nan)
    other = batch_of(run, values, rank=1, loss=lambda step: 100.0)
    services.points_store(run=run, attempt=1, batches=[points, other])
    services.summaries_refresh(wait=False)
    assert summary(run, "loss") == (None, 2.0, 4.0, 3.0, 2), "of the lowest rank only"
    assert summary(run, "broken") == (None, None, None, None, 0)


def test_a_later_attempt_replaces_the_steps_that_it_repeats(run: Run) -> None:
    for attempt, steps, value in ((1, range(1, 11), 9.0), (2, range(6, 11), 3.0)):
        seqs, loss = range(1, len(steps) + 1), {"loss": lambda step, value=value: value}
        points = batch_of(run, seqs, attempt=attempt, steps=steps, **loss)
        services.points_store(run=run, attempt=attempt, batches=[points])
    services.summaries_refresh(wait=False)
    assert summary(run, "loss") == (3.0, 3.0, 9.0, 6.0, 10)


def test_points_that_come_while_a_summary_is_computed_are_not_lost(
    run: Run, batch: Callable[..., PointBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.telemetry.writing import summaries

    services.points_store(run=run, attempt=1, batches=[batch([1])])
    compute = summaries.summarize

    def slow(item: Run) -> None:
        compute(item)
        services.points_store(run=run, attempt=1, batches=[batch([2])])

    monkeypatch.setattr(summaries, "summarize", slow)
    summaries.refresh(wait=False)
    assert summary(run, "loss")[-1] == 1 and StaleSummary.objects.filter(taken=None).exists()
    monkeypatch.setattr(summaries, "summarize", compute)
    summaries.refresh(wait=False)
    assert summary(run, "loss")[-1] == 2 and not StaleSummary.objects.exists()
