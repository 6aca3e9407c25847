"""Autotune in the control plane: refusals, orders, reports, the chosen plan, calibration, pages."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from orchestrator.common.errors import Refusal
from orchestrator.runs import services
from orchestrator.runs.models import Attempt, PlanTrials, Run, RunParameter
from orchestrator.runs.plan_trials import reports
from orchestrator.runs.plan_trials.orders import trials_order
from orchestrator.runs.plan_trials.table import periods_of, trial_lines, trials_of
from orchestrator.runs.submission.preview import spec_preview
from orchestrator.scheduling import dispatch
from orchestrator.scheduling import services as scheduling
from orchestrator.telemetry import outcome
from tests import factories
from workers.contracts.wire.maintenance.plan_trials import BEGAN, CHOSEN, TRIAL, TRIAL_BEGAN

pytestmark = pytest.mark.django_db

LONG = {"steps": 100_000, "seq_len": 128}


def spec(**changes: Any) -> dict[str, Any]:
    document = {"kind": "train", "plan": "auto", "train": LONG, "autotune": {"top_k": 3}}
    return {**document, "resources": {"devices": 4}, **changes}


def submit(owner: User, **changes: Any) -> Run:
    return services.run_submit(owner=owner, name="tuned", spec=spec(**changes))


@pytest.fixture
def node() -> None:
    factories.node("n1", devices=4)


@pytest.fixture
def attempt(owner: User, node: None) -> Attempt:
    submit(owner)
    scheduling.tick()
    return Attempt.objects.select_related("run").get()


def report(attempt: Attempt, type: str, at: float | None = None, /, **data: Any) -> None:
    data = {"spent_s": 5.0, "elapsed_s": 5.0, **data}
    reports.apply_event(attempt=attempt, type=type, data=data, time=at or time.time())


def result(index: int, step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "state": "measured",
        "step_time_s": step_s,
        "low_s": step_s * 0.9,
        "high_s": step_s * 1.1,
        "steps": 12,
        "visits": 1,
        "peak_bytes": 2e7,
        "seconds": 3.0,
        **more,
    }


def next_attempt(attempt: Attempt, *, exit_class: str, node: str = "n1") -> Attempt:
    services.attempt_exited(attempt=attempt, exit_class=exit_class)
    Run.objects.filter(pk=attempt.run_id).update(not_before=None, state="queued")
    placement = [{"node": node, "address": node, "devices": [0, 1, 2, 3], "node_rank": 0}]
    new = services.attempt_create(run=Run.objects.get(pk=attempt.run_id), placement=placement)
    assert new is not None
    return new


def test_candidates_are_distinct_and_ordered_by_prediction(owner: User, node: None) -> None:
    run = submit(owner, autotune={"top_k": 8})
    row = PlanTrials.objects.get(run=run)
    times = [each["prediction"]["step_time_s"] for each in row.candidates]
    assert len(times) == 8 and times == sorted(times)
    plans = [each["plan"] for each in row.candidates]
    assert len({str(sorted(plan.items())) for plan in plans}) == 8
    assert {plan["recompute"] for plan in plans} == {"none"}, "memory is not scarce"
    assert {plan["precision"] for plan in plans} == {"fp32"}
    assert {plan["global_batch_size"] for plan in plans} == {4}, "results depend on the batch"
    assert row.settings["steps"] == 12 and run.plan == plans[0]
    whole = (run.prediction or {})["whole_run"]
    assert whole["terms"]["trials_s"] > 0
    assert sum(whole["terms"].values()) == pytest.approx(whole["total_s"])


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"autotune": {"top_k": 1}}, "autotune.top_k", "not a number of plans"),
        ({"autotune": {"top_k": 17}}, "autotune.top_k", "not a number of plans"),
        ({"autotune": {"steps": 1}}, "autotune.steps", "at least 3"),
        ({"plan": {"dp": 4, "global_batch_size": 4}}, "autotune", "plan is given"),
        ({"train": {"steps": 50, "seq_len": 128}}, "autotune.max_share", "trials may take"),
        ({"autotune": {"max_seconds": 2}}, "autotune.max_seconds", "trials may take 2 s"),
        ({"resources": {"devices": 4, "min_devices": 2}}, "autotune", "fixed number of devices"),
        ({"kind": "serve", "train": None, "plan": None, "serve": {}}, "autotune", "serve runs"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    owner: User, node: None, changes: dict[str, Any], field: str, text: str
) -> None:
    body = {key: value for key, value in spec(**changes).items() if value is not None}
    with pytest.raises(Refusal) as refused:
        services.run_submit(owner=owner, name="tuned", spec=body)
    [problem] = [each for each in refused.value.errors if each["field"] == field]
    assert text in problem["message"] and problem["hint"]
    assert not Run.objects.exists()


def test_policy_optimization_is_refused(owner: User, node: None) -> None:
    grpo = {"rewards": [{"kind": "exact"}]}
    train = {**LONG, "objective": "grpo", "grpo": grpo}
    problems = spec_preview(spec(train=train), by=owner)["problems"]
    assert any(
        each["field"] == "autotune" and "alternates sampling" in each["message"]
        for each in problems
    )


def test_the_preview_names_what_trials_take(owner: User, node: None) -> None:
    preview = spec_preview(spec(), by=owner)
    assert preview["trials"]["plans"] == 3
    assert 0 < preview["trials"]["seconds"] <= preview["trials"]["budget_s"]
    assert spec_preview(spec(autotune=None), by=owner)["trials"] is None


def test_a_launch_order_lists_the_plans_until_one_is_chosen(attempt: Attempt) -> None:
    share = attempt.placement[0]
    order = dispatch.launch_order(attempt, share, gpu=False)
    assert order.trials is not None and order.trials.run_steps == 100_000
    assert [each.index for each in order.trials.candidates] == [0, 1, 2]
    report(attempt, TRIAL, **result(0, 0.5))
    report(attempt, TRIAL, **result(2, 0.3))
    report(attempt, CHOSEN, index=2, reason="Plan 3.", results=[result(0, 0.5), result(2, 0.3)])
    attempt = Attempt.objects.select_related("run").get()
    order = dispatch.launch_order(attempt, share, gpu=False)
    assert order.trials is None
    assert order.plan == PlanTrials.objects.get().candidates[2]["plan"]


def test_the_chosen_plan_is_the_runs_plan_everywhere(attempt: Attempt) -> None:
    row = PlanTrials.objects.get()
    report(attempt, TRIAL_BEGAN, index=0)
    run = Run.objects.get()
    assert run.summary["trying"] == {"number": 1, "count": 3, "again": False}
    results = [result(1, 0.2)]
    chosen: dict[str, Any] = {"index": 1, "reason": "Plan 2.", "results": results}
    report(attempt, CHOSEN, spent_s=40.0, **chosen)
    report(attempt, CHOSEN, spent_s=99.0, **{**chosen, "index": 0})  # of a second delivery
    run.refresh_from_db()
    assert run.plan == row.candidates[1]["plan"] and "trying" not in run.summary
    prediction = run.prediction or {}
    assert prediction["step_time_s"] == row.candidates[1]["prediction"]["step_time_s"]
    assert prediction["whole_run"]["terms"]["trials_s"] == 40.0
    zero = RunParameter.objects.get(run=run, name="plan.zero")
    assert zero.number == (run.plan or {})["zero"]
    table = trials_of(run=run)
    assert table is not None and table["chosen"] == 2 and table["spent_s"] == 40.0
    assert [each["state"] for each in table["rows"]] == ["not_tried", "measured", "not_tried"]


def test_trials_continue_after_a_killed_supervisor_without_double_counts(
    attempt: Attempt,
) -> None:
    report(attempt, TRIAL_BEGAN, index=0, spent_s=8.0)
    report(attempt, TRIAL, spent_s=11.0, **result(0, 0.5))
    report(attempt, TRIAL_BEGAN, index=1, spent_s=11.0)
    second = next_attempt(attempt, exit_class="infrastructure")
    order = trials_order(second)
    assert order is not None and order["spent_s"] == 11.0
    assert [each["index"] for each in order["results"]] == [0]
    assert order["interrupted"] == {1: 1}
    # late reports of the first attempt change nothing
    report(attempt, TRIAL, spent_s=99.0, **result(1, 0.1))
    assert "1" not in PlanTrials.objects.get().results
    report(second, TRIAL_BEGAN, index=1, spent_s=14.0)
    third = next_attempt(second, exit_class="lost")
    order = trials_order(third)
    assert order is not None and order["interrupted"] == {1: 2} and order["spent_s"] == 14.0


def test_a_pause_interrupts_no_plan(attempt: Attempt) -> None:
    report(attempt, TRIAL_BEGAN, index=0)
    second = next_attempt(attempt, exit_class="preempted")
    assert (trials_order(second) or {})["interrupted"] == {}


def test_times_of_other_nodes_do_not_count_but_failures_do(attempt: Attempt) -> None:
    report(attempt, TRIAL_BEGAN, index=0)
    report(attempt, TRIAL, **result(0, 0.5))
    report(attempt, TRIAL, index=1, state="failed", exit_class="out_of_memory", message="OOM")
    second = next_attempt(attempt, exit_class="infrastructure", node="n2")
    order = trials_order(second)
    assert order is not None and [each["index"] for each in order["results"]] == [1]


def test_a_retry_after_all_plans_failed_tries_them_again(attempt: Attempt) -> None:
    for index in range(3):
        report(attempt, TRIAL, index=index, state="failed", exit_class="user_error", message="x")
    second = next_attempt(attempt, exit_class="user_error")
    assert (trials_order(second) or {})["results"] == []


def test_wrong_reports_are_refused(attempt: Attempt) -> None:
    with pytest.raises(ValueError, match="there is no 7"):
        report(attempt, TRIAL, **result(7, 0.5))
    with pytest.raises(ValueError, match="there is no 3"):
        report(attempt, CHOSEN, index=3, reason="", results=[])
    assert PlanTrials.objects.get().decided is None


def test_trials_are_measurements_for_calibration(attempt: Attempt) -> None:
    failed = {"index": 1, "state": "failed", "exit_class": "out_of_memory", "message": "OOM"}
    results = [result(0, 0.5), failed, result(2, 0.3)]
    report(attempt, CHOSEN, index=2, reason="", results=results)
    run = Run.objects.get()
    lines = trial_lines(run=run)
    assert [line["measured"] for line in lines] == [
        {"step_time_s": 0.5},
        {"out_of_memory": True},
        {"step_time_s": 0.3},
    ]
    assert len({line["id"] for line in lines}) == 3
    assert isinstance(outcome.measurement_lines(run=run), str), "the run has not ended"
    services.attempt_exited(attempt=attempt, exit_class="cancelled")
    Run.objects.update(state="cancelled", ended=attempt.created)
    run.refresh_from_db()
    assert outcome.measurement_lines(run=run) == lines, "the run itself logged too few steps"


def test_periods_of_trials_are_of_their_attempt(attempt: Attempt) -> None:
    report(attempt, BEGAN, 992.5, count=3, elapsed_s=0.5)
    report(attempt, TRIAL_BEGAN, 1000.0, index=0, elapsed_s=8.0)
    assert periods_of(run=attempt.run) == {1: (992.0, None)}
    report(attempt, CHOSEN, 1050.0, elapsed_s=58.0, index=0, reason="", results=[])
    assert periods_of(run=attempt.run) == {1: (992.0, 1050.0)}


def test_page_and_rest_show_predicted_and_measured_ranks(
    owner: User, attempt: Attempt, client: Client
) -> None:
    client.force_login(owner)
    address = f"/runs/{attempt.run_id}/?tab=trials"
    page = client.get(address).content.decode()
    assert "3 plans will be tried" in page and 'hx-trigger="every 4s"' in page
    report(attempt, TRIAL_BEGAN, index=1)
    services.attempt_running(attempt=attempt)
    page = client.get(address).content.decode()
    assert "Trying plan 2 of 3" in page and "being tried" in page
    api = factories.api(owner)
    answer = api.get(f"/api/v1/runs/{attempt.run_id}/plan-trials").json()
    assert answer["current"] == 2 and answer["chosen"] is None
    assert [row["state"] for row in answer["rows"]] == ["waiting", "trying", "waiting"]
    report(attempt, TRIAL, **result(1, 0.5))
    assert "1 of 3 plans measured so far" in client.get(address).content.decode()
    failed = {"index": 1, "state": "failed", "exit_class": "out_of_memory", "message": "3 GiB"}
    results = [result(0, 0.5), failed, result(2, 0.25)]
    report(attempt, CHOSEN, index=2, reason="Plan 3 is the fastest.", results=results)
    page = client.get(address).content.decode()
    assert "Plan 3 by prediction is the fastest" in page and "50% less" in page
    assert "3 GiB" in page and "rank-chart" in page and "every 4s" not in page
    answer = api.get(f"/api/v1/runs/{attempt.run_id}/plan-trials").json()
    assert [row["measured_rank"] for row in answer["rows"]] == [2, None, 1]
    assert answer["chosen"] == 3 and answer["rows"][2]["chosen"] and answer["decided"]
    other = factories.run(owner)
    assert api.get(f"/api/v1/runs/{other.pk}/plan-trials").status_code == 422
    assert "Plan trials" not in client.get(f"/runs/{other.pk}/").content.decode()
