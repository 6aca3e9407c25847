"""The predicted time of a whole run, the start learned from ended runs, and the page of errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.runs.submission.prediction.expected_restarts import (
    PUBLISHED_RATE,
    failure_rate,
    forget_rates,
    rate_of,
    restarts_s,
)
from orchestrator.runs.submission.prediction.whole_run import learned_starts, whole_run
from orchestrator.scheduling import services
from orchestrator.telemetry.outcome import comparisons
from orchestrator.telemetry.services import points_store
from orchestrator.telemetry.whole_run import measurements_store
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of
from webui.planner import run_accuracy
from webui.planner.run_accuracy import terms
from webui.tabs.whole_run import content
from workers.contracts import RunSpec

pytestmark = pytest.mark.django_db


def submitted(owner: User, **train: Any) -> Run:
    body = {**factories.spec()["train"], "steps": 100, **train}
    return factories.run(owner, train=body)


def ended(run: Run, *, step_s: float, beyond_s: float) -> Run:
    services.tick()
    attempt = run.attempts.get()
    points = batch_of(
        run,
        range(1, 101),
        step_time_s=lambda step: step_s,
        tokens_per_s=lambda step: 1000.0,
        **{"memory/allocated_bytes": lambda step: 5e8},
    )
    points_store(run=run, attempt=1, batches=[points])
    total = timedelta(seconds=100 * step_s + beyond_s)
    run.attempts.update(state="exited", exit_class="ok", ended=attempt.created + total)
    Run.objects.filter(pk=run.pk).update(
        state="finished", ended=attempt.created + total, started=attempt.created
    )
    run.refresh_from_db()
    assert measurements_store(run=run)
    return run


def test_terms_add_up_and_intervals_hold_the_total(owner: User) -> None:
    factories.node("n1", devices=2)
    run = submitted(
        owner,
        eval={"every_steps": 50, "batches": 6},
        checkpoint={"every_steps": 25, "async": False},
    )
    whole = run.prediction["whole_run"]
    terms = whole["terms"]
    assert sum(terms.values()) == pytest.approx(whole["total_s"])
    assert terms["steps_s"] == pytest.approx(100 * run.prediction["step_time_s"])
    # two rounds of six batches, each a forward pass: a third of the compute
    assert terms["evaluation_s"] == pytest.approx(4 * run.prediction["time"]["compute_s"])
    assert terms["checkpoints_s"] > 4 * 0.3 and whole["start_from"] == 0
    # 1 failure of the published rate, 3.8 per 1,000 node-days, and none of the pool's own
    expected = whole["restarts"]["expected"]
    work = whole["total_s"] - terms["start_s"]
    assert expected == pytest.approx(3.79e-3 / 86400 * work, rel=0.01)
    lost = 30 + terms["start_s"] + work / 8  # half of a quarter of the run
    assert terms["restarts_s"] == pytest.approx(expected * lost, rel=0.01)
    assert whole["low_s"] < whole["total_s"] < whole["high_s"]
    plain = submitted(owner).prediction["whole_run"]
    assert plain["terms"]["evaluation_s"] == plain["terms"]["checkpoints_s"] == 0
    assert 0 < plain["usd"] < whole["usd"]


def test_the_measured_time_is_without_the_queue_of_an_engine(owner: User) -> None:
    factories.node("n1", devices=2)
    run = ended(submitted(owner), step_s=0.5, beyond_s=8.0)
    assert run.prediction["measured"]["total_s"] == pytest.approx(58)
    # the same attempt as a job of Slurm, which waited for an hour before it started
    attempt = run.attempts.get()
    share = {**attempt.placement[0], "engine": "slurm"}
    run.attempts.update(placement=[share], created=attempt.created - timedelta(hours=1))
    run.attempts.update(launched=attempt.created)
    assert measurements_store(run=run)
    assert run.prediction["measured"]["total_s"] == pytest.approx(58)
    assert run.prediction["measured"]["beyond_steps_s"] == pytest.approx(8)


def test_restarts_are_expected_as_often_as_nodes_of_the_pool_failed(
    owner: User, django_assert_num_queries: Any
) -> None:
    assert rate_of([]).per_node_s == pytest.approx(PUBLISHED_RATE)
    # ten failures in 10,000 node-hours outweigh the published rate
    many = rate_of([(10, 360_000.0, True)] * 10)
    assert many.failures == 10 and many.per_node_s == pytest.approx(10 / 3.6e7, rel=0.25)
    saved = restarts_s(many, nodes=8, work_s=36_000.0, start_s=60.0, checkpoint_s=600.0)
    assert saved == pytest.approx(many.restarts(nodes=8, seconds=36_000.0) * 390)
    unsaved = restarts_s(many, nodes=8, work_s=36_000.0, start_s=60.0, checkpoint_s=None)
    assert unsaved > 20 * saved
    factories.node("n1", devices=2)
    run = submitted(owner)
    services.tick()
    started = run.attempts.get().created
    run.attempts.update(
        state="exited", exit_class="lost", ended=started, created=started - timedelta(hours=2)
    )
    assert failure_rate(pool="default").failures == 0  # of the submission, less than a minute ago
    forget_rates()
    with django_assert_num_queries(1):
        for _ in range(3):
            rate = failure_rate(pool="default")
    assert (rate.failures, rate.node_s) == (1, 7200.0)
    assert rate.per_node_s == pytest.approx(3 * PUBLISHED_RATE, rel=0.01)
    assert failure_rate(pool="other").failures == 0


def test_time_in_the_queue_of_an_engine_is_not_time_of_nodes(owner: User) -> None:
    factories.node("n1", devices=2)
    run = submitted(owner)
    services.tick()
    attempt = run.attempts.get()
    ended = attempt.created + timedelta(hours=10)
    placement = [{**share, "engine": "slurm"} for share in attempt.placement]
    run.attempts.update(state="exited", exit_class="lost", ended=ended, placement=placement)
    forget_rates()
    rate = failure_rate(pool="default")  # the job has not started
    assert (rate.failures, rate.node_s) == (0, 0.0)
    run.attempts.update(launched=ended - timedelta(hours=2))
    forget_rates()
    rate = failure_rate(pool="default")
    assert (rate.failures, rate.node_s) == (1, 7200.0)


def test_expected_restarts_are_not_compared_with_a_run_of_one_attempt(owner: User) -> None:
    factories.node("n1", devices=2)
    run = submitted(owner)
    whole = run.prediction["whole_run"]
    without, low, high = whole["total_s"], whole["low_s"], whole["high_s"]
    assert whole["terms"]["restarts_s"] < 0.01 * without
    # a pool on which nodes often fail: half as long again
    whole["terms"]["restarts_s"] += 0.5 * without
    whole.update(total_s=1.5 * without, low_s=low + 0.3 * without, high_s=high + 0.7 * without)
    run.save(update_fields=["prediction"])
    step_s = run.prediction["step_time_s"]
    run = ended(run, step_s=step_s, beyond_s=without - 100 * step_s)
    compared = {item.metric: item for item in comparisons(run=run)}
    assert compared["wall_clock_s"].ratio == pytest.approx(1, abs=0.02)
    assert not compared["wall_clock_s"].missed
    term = next(term for term in terms([run]) if term.label == "Whole run")
    assert term.bias in ("+0.0%", "−0.0%", "+0.1%") and term.inside == "100%"
    assert run_accuracy._bounds(run.prediction, "total_s") == (
        pytest.approx(low, rel=0.01),
        pytest.approx(high, rel=0.01),
    )


def test_the_run_page_shows_the_whole_run_by_term(owner: User, client: Client) -> None:
    client.force_login(owner)
    factories.node("n1", devices=2)
    run = submitted(owner)
    page = client.get(f"/runs/{run.pk}/?tab=performance").content.decode()
    assert "Predicted time of the whole run" in page and "Expected restarts" in page
    assert "Start: a default, since no run of the pool has ended." in page
    shown = content(run.prediction)
    assert shown is not None
    assert sum(term.width for term in shown["terms"]) == pytest.approx(100, abs=0.1)
    assert content(None) is None and content({"kind": "serving"}) is None


def test_many_restarts_and_the_interval_are_written_as_a_reader_expects() -> None:
    restarts = {"expected": 413.7, "failures": 3, "node_hours": 20_000.0}
    times = {"total_s": 9000.0, "low_s": 7200.0, "high_s": 10_800.0}
    shown = content({"whole_run": {**times, "terms": {"steps_s": 9000.0}, "restarts": restarts}})
    assert shown is not None
    assert (shown["total"], shown["interval"]) == ("about 2.5 h", "2 h to 3 h")
    assert "414 restarts expected" in shown["note"]


def test_rollouts_are_a_term_of_their_own(owner: User) -> None:
    run = submitted(owner)
    spec = RunSpec.from_dict(run.spec)
    step = run.prediction["step_time_s"]
    whole = whole_run({**run.prediction, "rollout_s": 0.6 * step}, spec, pool="default")
    assert whole["terms"]["rollouts_s"] == pytest.approx(60 * step)
    assert whole["terms"]["steps_s"] == pytest.approx(40 * step)
    assert whole["total_s"] == pytest.approx(run.prediction["whole_run"]["total_s"])


def test_the_start_is_learned_from_ended_runs(owner: User) -> None:
    factories.node("n1", devices=2)
    run = ended(submitted(owner), step_s=0.1, beyond_s=30.0)
    assert run.prediction["measured"]["total_s"] == pytest.approx(40.0)
    assert run.prediction["measured"]["beyond_steps_s"] == pytest.approx(30.0)
    compared = {item.metric: item for item in comparisons(run=run)}
    assert compared["wall_clock_s"].measured == pytest.approx(40.0)
    assert learned_starts(pool="default", device="cpu") == [pytest.approx(30.0)]
    later = submitted(owner).prediction["whole_run"]
    assert later["terms"]["start_s"] == pytest.approx(30.0) and later["start_from"] == 1
    compiled = RunSpec.from_dict({**run.spec, "train": {**run.spec["train"], "compile": True}})
    assert whole_run(run.prediction, compiled, pool="other")["terms"]["start_s"] == 68.0


def test_the_page_shows_errors_by_term(owner: User, client: Client) -> None:
    client.force_login(owner)
    assert "No training run" in client.get("/planner/accuracy/").content.decode()
    factories.node("n1", devices=2)
    run = submitted(owner)
    run = ended(run, step_s=1.25 * run.prediction["step_time_s"], beyond_s=8.0)
    page = client.get("/planner/accuracy/").content.decode()
    assert "+25.0%" in page and run.name in page and "Whole run" in page
