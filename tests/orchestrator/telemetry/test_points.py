"""Points stored by the service come back from the selectors once each, in any order of arrival."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors, services
from orchestrator.telemetry.models import Chunk, Tail
from orchestrator.telemetry.packing.chunks import join_curves
from orchestrator.telemetry.reading import levels
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of
from workers.contracts.wire.points import PointBatch

pytestmark = pytest.mark.django_db
Batch = Callable[..., PointBatch]


def store(run: Run, *batches: PointBatch, attempt: int = 1) -> list[services.Stored]:
    return services.points_store(run=run, attempt=attempt, batches=batches)


def test_a_metric_is_read_as_it_was_logged(run: Run, batch: Batch) -> None:
    store(run, batch([1, 2, 3], loss=lambda step: 5.5 - step))
    assert selectors.series(run=run, name="loss").to_dict() == {
        "name": "loss",
        "unit": "nats/token",
        "rank": 0,
        "attempt": 1,
        "axis": "step",
        "x": [1, 2, 3],
        "y": [4.5, 3.5, 2.5],
        "total_points": 3,
        "last_seq": 3,
    }
    assert selectors.series(run=run, name="loss", x="tokens").x == [100, 200, 300]
    assert selectors.series(run=run, name="loss", x="time").x == [1001.0, 1002.0, 1003.0]
    assert selectors.series_names(run=run) == ["loss"]


def test_a_metric_without_points_is_empty(run: Run) -> None:
    answer = selectors.series(run=run, name="loss")
    assert (answer.x, answer.y, answer.total_points, answer.last_seq) == ([], [], 0, 0)
    assert list(selectors.series_raw(run=run, name="loss")) == []


@pytest.mark.parametrize("seed", range(4))
def test_any_order_with_repeats_gives_each_point_once(run: Run, seed: int) -> None:
    """Random batches, shuffled, a third sent twice, as after lost connections and crashes."""
    draw = random.Random(seed)
    splits = sorted(draw.sample(range(2, 1500), 60))
    parts = [range(a, b) for a, b in zip([1, *splits], [*splits, 1501], strict=True)]
    sent = [*parts, *draw.sample(parts, 20)]
    if seed:
        draw.shuffle(sent)
    known = 0
    for part in sent:
        sparse = {"loss": float, "val_loss": lambda step: step / 2 if step % 50 == 0 else None}
        (stored,) = store(run, batch_of(run, part, **sparse))
        known += stored.known
    assert stored.complete_to == 1500
    assert known == sum(len(part) for part in sent) - 1500
    rows = sorted(selectors.series_raw(run=run, name="loss"))
    assert rows == [
        (1, 0, step, step, step * 100, 1000.0 + step, float(step)) for step in range(1, 1501)
    ]
    answer = selectors.series(run=run, name="loss", points=5000)
    assert (answer.x, answer.y) == (list(range(1, 1501)), [float(step) for step in range(1, 1501)])
    answer = selectors.series(run=run, name="val_loss")
    assert (answer.x, answer.total_points) == (list(range(50, 1501, 50)), 30)
    assert Tail.objects.count() <= 9


def test_per_step_the_newest_attempt_wins_and_then_the_lowest_rank(run: Run) -> None:
    draw = random.Random(7)
    wanted: dict[int, tuple[int, int]] = {}
    for attempt in (1, 2, 3):
        for rank in (2, 1, 0):
            steps = sorted(draw.sample(range(1, 60), 25))
            value = float(attempt * 10 + rank)
            points = batch_of(
                run,
                range(1, 26),
                steps=steps,
                rank=rank,
                attempt=attempt,
                loss=lambda _, v=value: v,
            )
            store(run, points, attempt=attempt)
            for step in steps:
                wanted[step] = max(wanted.get(step, (0, 0)), (attempt, -rank))
    expected = {step: attempt * 10 - rank for step, (attempt, rank) in sorted(wanted.items())}
    answer = selectors.series(run=run, name="loss")
    assert dict(zip(answer.x, answer.y, strict=True)) == expected
    assert (answer.total_points, answer.rank, answer.last_seq) == (len(expected), 0, 25)
    assert {row[3]: row[6] for row in selectors.series_raw(run=run, name="loss")} == expected
    only = selectors.series(run=run, name="loss", rank=1, attempt=2)
    assert (set(only.y), only.total_points, only.rank) == ({21.0}, 25, 1)


def test_raw_points_of_a_live_run_ascend_by_step_though_ranks_report_at_different_times(
    run: Run,
) -> None:
    for attempt, first, reported in ((1, 1, {0: 6, 1: 8}), (2, 5, {0: 300, 1: 303})):
        for rank, last in reported.items():
            points = batch_of(run, range(first, last + 1), rank=rank, attempt=attempt)
            store(run, points, attempt=attempt)
    rows = list(selectors.series_raw(run=run, name="loss"))
    assert [row[3] for row in rows] == list(range(1, 304))


def test_raw_points_that_move_to_a_chunk_during_a_read_are_read_once(run: Run) -> None:
    store(run, batch_of(run, range(1, 201)))
    (before,) = levels.sources(run.id, "loss")
    store(run, batch_of(run, range(201, 301)))
    (after,) = levels.sources(run.id, "loss")
    assert len(before.tail) == 200 and after.series is not None and after.series.chunks == 1
    during = replace(after, tail=before.tail)
    read = join_curves(list(levels.iterate(during, levels.Window())))
    assert read.step.tolist() == list(range(1, 257))


def test_points_after_a_number_and_in_windows(run: Run, batch: Batch) -> None:
    store(run, batch(range(1, 701)))
    after = selectors.series(run=run, name="loss", after_seq=690)
    assert (after.x, after.total_points, after.last_seq) == (list(range(691, 701)), 10, 700)
    assert selectors.series(run=run, name="loss", after_seq=700).x == []
    assert selectors.series(run=run, name="loss", from_=250, to=260).x == list(range(250, 261))
    assert selectors.series(run=run, name="loss", x="time", from_=1250.0, to=1251.5).y == [
        250.0,
        251.0,
    ]
    store(run, batch_of(run, range(1, 4), steps=[650, 651, 652], attempt=2), attempt=2)
    assert selectors.series(run=run, name="loss", after_seq=1).x == [651, 652]
    # a number of the older attempt
    assert selectors.series(run=run, name="loss", after_seq=700).total_points == 700


def test_a_long_metric_preserves_every_spike_and_marker(run: Run) -> None:
    """70,000 points fill 273 chunks and one row of summaries."""
    count = 70_000
    draw = np.random.default_rng(3)
    y = 2 + draw.normal(size=count) * 0.01
    spikes = draw.choice(count, 20, replace=False)
    y[spikes] = 9 + np.arange(20)
    y[40_000], y[40_500] = math.nan, math.inf
    for start in range(0, count, 7000):
        steps = range(start + 1, start + 7001)
        store(run, batch_of(run, steps, loss=lambda step: float(y[step - 1])))
    assert Chunk.objects.filter(level=1).count() == 1
    for points in (300, 1500, 5000):
        answer = selectors.series(run=run, name="loss", points=points)
        assert len(answer.x) <= points
        assert set(spikes + 1) <= set(answer.x)
        assert {40_001, 40_501} <= {
            x for x, v in zip(answer.x, answer.y, strict=True) if not math.isfinite(v)
        }
        assert (answer.total_points, answer.last_seq) == (count, count)
        assert answer.low is not None
    part = selectors.series(run=run, name="loss", from_=1001, to=66_000.5, points=200)
    assert part.total_points == 65_000
    assert (part.x[0], part.x[-1]) == (1001, 66_000)
    assert max(selectors.sparkline(run_ids=[run.pk], name="loss")[run.pk]) == 28.0


def test_a_resumed_long_run_counts_each_step_once(run: Run) -> None:
    for start in range(1, 30_001, 6000):
        store(run, batch_of(run, range(start, start + 6000)))
    for start in range(1, 20_001, 5000):
        steps = range(start + 25_000, start + 30_000)
        store(run, batch_of(run, range(start, start + 5000), steps=steps, attempt=2), attempt=2)
    answer = selectors.series(run=run, name="loss", points=400)
    assert (answer.total_points, answer.x[0], answer.x[-1], answer.attempt) == (
        45_000,
        1,
        45_000,
        2,
    )
    assert answer.x == sorted(answer.x)


def test_newest_values_memory_and_sparklines(run: Run, owner: User) -> None:
    memory = {"memory/params_bytes": lambda _: 64.0, "memory/grads_bytes": lambda _: 32.0}
    for rank in (0, 1):
        store(
            run,
            batch_of(run, [1, 2], rank=rank, loss=lambda step, more=rank: step + more, **memory),
        )
    assert selectors.latest(run=run)["loss"] == 2.0
    assert selectors.memory_by_rank(run=run) == {
        rank: {"params": 64.0, "grads": 32.0} for rank in (0, 1)
    }
    silent, other = factories.external_run(owner), factories.external_run(owner)
    store(
        other,
        batch_of(other, range(1, 2001), loss=lambda step: math.nan if step == 7 else float(step)),
    )
    curves = selectors.sparkline(run_ids=[run.pk, silent.pk, other.pk], name="loss", points=20)
    assert curves[run.pk] == [1.0, 2.0]
    assert silent.pk not in curves
    assert (len(curves[other.pk]) <= 20, curves[other.pk][0], curves[other.pk][-1]) == (
        True,
        1.0,
        2000.0,
    )


def test_flops_are_tokens_times_the_models_flops(owner: User, run: Run) -> None:
    trained = factories.run(owner, model="llama-tiny")
    store(trained, batch_of(trained, [1, 2]))
    flops = selectors.series(run=trained, name="loss", x="flops").x
    assert flops[1] == 2 * flops[0] > 1e8
    assert selectors.series(run=trained, name="loss", x="flops", from_=flops[1]).y == [2.0]
    with pytest.raises(Refusal) as refused:
        selectors.series(run=run, name="loss", x="flops")
    assert refused.value.status == 422


def test_points_are_published_to_the_run_and_the_fleet(
    run: Run, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    announced: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(live, "announce", lambda *frame: announced.append(frame))
    with django_capture_on_commit_callbacks(execute=True):
        store(
            run,
            batch_of(run, [1, 2], loss=lambda step: math.nan if step == 2 else 1.0),
            batch_of(run, [1, 2], rank=1),
        )
    frames = [json.loads(text) for _, text in live.frames_after(f"run:{run.pk}", 0)]
    (points,) = [frame for frame in frames if frame["type"] == "points"]
    assert (points["attempt"], points["rank"], points["values"]) == (
        1,
        0,
        {"loss": [[1, 1.0], [2, "NaN"]]},
    )
    ((topic, type, progress),) = announced  # without a number: the next one replaces it
    assert (topic, type) == ("fleet", "progress")
    assert (progress["owner"], progress["run"]) == (run.owner_id, str(run.pk))
    assert (progress["summary"]["step"], progress["summary"]["loss"]) == (2, "NaN")
    run.refresh_from_db()
    assert run.summary["step"] == 2
    assert run.last_seen is not None


def test_frames_of_a_backlog_are_split_and_those_of_an_import_are_reduced(run: Run) -> None:
    def published_steps() -> list[list[int]]:
        frames: list[Any] = [json.loads(text) for _, text in live.frames_after(f"run:{run.pk}", 0)]
        return [
            [step for step, _ in frame["values"]["loss"]]
            for frame in frames
            if frame["type"] == "points"
        ]

    store(run, batch_of(run, range(1, 601)))
    assert [step for steps in published_steps() for step in steps] == list(range(1, 601))
    assert max(map(len, published_steps())) <= 256
    store(run, batch_of(run, range(601, 9001)))
    assert len(published_steps()[-1]) <= 512
