"""Sweeps with runs that train without ranks: each method to its end, budgets, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.common.errors import conflict
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from orchestrator.sweeps import selectors
from orchestrator.sweeps.advance import sweeps_advance
from orchestrator.sweeps.models import Sweep
from tests import factories
from tests.conftest import FakeClock
from tests.orchestrator.sweeps.training import Training, bowl

LR = "train.optimizer.lr"
SPEC = factories.spec(train={"steps": 81, "seq_len": 64})
SAVES = factories.spec(train={"steps": 81, "seq_len": 64, "checkpoint": {"every_steps": 20}})
SWEEPS = "/api/v1/sweeps"


@pytest.fixture
def training(live_redis: str, owner: User, clock: FakeClock) -> Training:
    return Training(factories.node(devices=8), clock, bowl)


def start(user: User, **changes: Any) -> Any:
    """The answer to a new sweep, by REST."""
    parameters = {LR: {"min": 1e-4, "max": 1, "scale": "log"}}
    body = {"name": "rates", "spec": SPEC, "parameters": parameters, **changes}
    return factories.api(user).post(SWEEPS, json.dumps(body), content_type="application/json")


def started(user: User, **changes: Any) -> Sweep:
    answer = start(user, **changes)
    assert answer.status_code == 201, answer.content
    return Sweep.objects.get(pk=answer.json()["id"])


def test_a_grid_runs_every_point_and_names_the_best(training: Training, owner: User) -> None:
    parameters = {LR: {"values": [1.0, 0.01, 0.0001]}, "train.seed": {"values": [1, 2]}}
    sweep = started(owner, method="grid", parameters=parameters, parallel=2)
    training.until_end(sweep, steps=40)
    assert (sweep.state, training.most_at_once) == ("finished", 2)
    document = factories.api(owner).get(f"{SWEEPS}/{sweep.pk}").json()
    points = [tuple(trial["parameters"].values()) for trial in document["trials"]]
    assert points == [(lr, seed) for lr in (1.0, 0.01, 0.0001) for seed in (1, 2)]
    assert document["best"]["parameters"] == {LR: 0.01, "train.seed": 1}
    assert document["best"]["value"] == pytest.approx(1 / 81) and document["best"]["step"] == 81
    assert document["importance"]["shares"][LR] > 0.8, document["importance"]
    run = Run.objects.get(pk=document["best"]["run"])
    assert run.spec[("train")]["optimizer"]["lr"] == 0.01 and f"sweep {sweep.pk}" in run.notes
    assert factories.api(owner).get("/api/v1/runs", {"tag": f"sweep-{sweep.pk}"}).json()["items"]


def test_tpe_finds_better_points_than_its_random_start(training: Training, owner: User) -> None:
    sweep = started(owner, method="tpe", budget={"runs": 16}, parallel=2)
    training.until_end(sweep, steps=81)
    values = [trial.value for trial in selectors.trials_of(sweep)]
    assert len(values) == 16 and min(values[6:]) < min(values[:6])


def test_asha_pauses_and_continues_only_the_best(training: Training, owner: User) -> None:
    sweep = started(
        owner, method="asha", asha={"min_steps": 9}, budget={"runs": 9}, parallel=3, seed=1
    )
    training.until_end(sweep, steps=5)
    trials = selectors.trials_of(sweep)
    assert sweep.state == "finished" and len(trials) == 9
    assert [trial.state for trial in trials].count("stopped") >= 6
    finished = [trial for trial in trials if trial.state == "finished"]
    assert finished and all(len(trial.results) == 2 for trial in finished)
    best = selectors.best_of(sweep, trials)
    assert best is not None and best.value == min(trial.value for trial in finished)
    assert best.results[0] == min(trial.results[0] for trial in trials)
    assert training.most_at_once <= 3
    steps = sum(trial.run.summary["step"] for trial in trials)
    assert steps < 9 * 81 / 2, "most points cost little"
    assert all(trial.run.attempt_number >= 2 for trial in finished), "by their checkpoints"


def test_pbt_forks_the_best_in_place_of_the_worst(training: Training, owner: User) -> None:
    sweep = started(
        owner,
        method="pbt",
        spec=SAVES,
        pbt={"population": 4, "every_steps": 30},
        parallel=1,
        seed=3,
    )
    training.until_end(sweep, steps=10)
    trials = selectors.trials_of(sweep)
    forks = [trial for trial in trials if trial.parent is not None]
    assert sweep.state == "finished" and len(forks) == 2, "one per interval"
    for fork in forks:
        assert fork.parent is not None and fork.run is not None and fork.parent.run is not None
        assert fork.run.forked_from == fork.parent.run
        ratio = fork.parameters[LR] / fork.parent.parameters[LR]
        assert round(ratio, 2) in (0.8, 1.25) or fork.parameters[LR] in (1e-4, 1)
        replaced = next(t for t in trials if f"trial {fork.number}," in t.message)
        assert replaced.state == "stopped" and replaced.member == fork.member
        assert replaced.results[-1] > fork.parent.results[len(replaced.results) - 1]
    ended = [trial for trial in trials if trial.state == "finished"]
    assert sorted(trial.member for trial in ended) == [0, 1, 2, 3]


def test_a_budget_of_device_hours_ends_a_sweep(training: Training, owner: User) -> None:
    sweep = started(owner, budget={"runs": 50, "device_hours": 0.1}, parallel=2)
    training.until_end(sweep, steps=20)
    assert sweep.state == "finished" and "0.1 device-hours" in sweep.message
    trials = selectors.trials_of(sweep)
    assert 2 <= len(trials) < 10
    assert {trial.state for trial in trials} <= {"finished", "stopped"}


def test_a_cancelled_sweep_leaves_no_run(training: Training, owner: User) -> None:
    sweep = started(owner, parallel=3)
    sweeps_advance()
    training.advance(5)
    for _ in range(2):
        answer = factories.api(owner).post(f"{SWEEPS}/{sweep.pk}/cancel")
        assert answer.status_code == 200 and answer.json()["state"] == "cancelled"
    training.advance(5)
    sweeps_advance()
    assert set(Run.objects.values_list("state", flat=True)) == {"cancelled"}
    assert Run.objects.count() == 3


def test_losses_that_are_not_numbers_end_a_sweep_with_the_reason(
    training: Training, owner: User
) -> None:
    training.loss = lambda spec, step: float("nan")
    sweep = started(owner, budget={"runs": 20}, parallel=1)
    training.until_end(sweep, steps=81)
    assert sweep.state == "failed" and Run.objects.count() == 3
    assert "loss is nan at step 81, not a number" in sweep.message


def test_a_metric_that_never_appears_is_named(training: Training, owner: User) -> None:
    sweep = started(owner, metric={"name": "accuracy"}, budget={"runs": 2}, parallel=1)
    training.until_end(sweep, steps=81)
    assert sweep.state == "failed"
    assert "The metric accuracy never appeared; it logged loss." in sweep.message


def test_failed_runs_and_runs_that_users_cancel_count_but_do_not_end_a_sweep(
    training: Training, owner: User
) -> None:
    sweep = started(owner, budget={"runs": 4}, parallel=2)
    sweeps_advance()
    first, second = Run.objects.order_by("pk")
    attempt = factories.running(first, training.node)
    runs.attempt_exited(attempt=attempt, exit_class="user_error", exit={"reason": "a bug"})
    runs.run_cancel(run=second, by=owner)
    training.until_end(sweep, steps=81)
    trials = selectors.trials_of(sweep)
    assert [trial.state for trial in trials] == ["failed", "stopped", "finished", "finished"]
    assert trials[0].message.startswith("The run failed: a bug")


PBT = {"method": "pbt", "pbt": {"every_steps": 20}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "method": "grid",
            "parameters": {f"train.{n}": {"values": list(range(100))} for n in "abc"},
        },
        "parameters",
        "the grid has 1,000,000 points; a sweep has at most 1,000 runs",
    ),
    ({"parameters": {}}, "parameters", "1 to 20 parameters"),
    (
        {"parameters": {"train.optimizer.lrr": {"values": [1]}}},
        "parameters.train.optimizer.lrr",
        "",
    ),
    ({"parameters": {LR: {"min": 2, "max": 1}}}, f"parameters.{LR}", "is empty"),
    ({"parameters": {LR: {"min": 0, "max": 1, "scale": "log"}}}, f"parameters.{LR}", "at 0"),
    ({"parameters": {LR: {"min": -3, "max": 1}}}, f"parameters.{LR}", ""),
    ({"parameters": {"model": {"values": ["x"]}}}, "parameters.model", "is not a model"),
    ({"method": "grid"}, f"parameters.{LR}", "a grid needs values"),
    ({"method": "asha"}, "asha", "needs options"),
    ({"method": "asha", "asha": {"min_steps": 81}}, "asha", "not before the end at 81"),
    (PBT, "spec.train.checkpoint", "saves none"),
    (
        {
            "method": "pbt",
            "pbt": {"every_steps": 20},
            "parameters": {"train.seed": {"values": [1]}},
        },
        "parameters.train.seed",
        "continues from a checkpoint",
    ),
    ({"metric": {"name": "val_loss"}}, "metric.name", "no validation"),
    ({"spec": {"kind": "serve"}}, "spec.kind", "kind 'serve'"),
    ({"spec": {**SPEC, "train": {"steps": 0, "seq_len": 64}}}, "spec.train.steps", ""),
    ({"method": "best"}, "method", ""),
    ({"budget": {"runs": 100_000}}, "budget.runs", ""),
]


@pytest.mark.parametrize(("changes", "field", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_by_field(
    owner: User, changes: dict[str, Any], field: str, words: str
) -> None:
    refused = start(owner, **changes)
    assert refused.status_code == 422, refused.content
    problems = {item["field"]: item["message"] for item in refused.json()["errors"]}
    assert field in problems and words in problems[field], problems
    assert not Sweep.objects.exists()


def test_a_refused_point_is_a_trial_with_its_reason(training: Training, owner: User) -> None:
    parameters = {"plan.micro_batch_size": {"values": [2, 3, 1]}, LR: {"values": [0.01]}}
    sweep = started(owner, method="grid", parameters=parameters)
    training.until_end(sweep, steps=81)
    trials = selectors.trials_of(sweep)
    assert [trial.state for trial in trials] == ["finished", "refused", "finished"]
    assert "global_batch_size" in trials[1].message and trials[1].run is None


OF_METHOD: dict[str, dict[str, Any]] = {
    "grid": {"parameters": {LR: {"values": [1.0, 0.01]}}},
    "asha": {"asha": {"min_steps": 9}, "budget": {"runs": 9}},
    "pbt": {"spec": SAVES, "pbt": {"population": 2, "every_steps": 20}, "budget": {"runs": 6}},
}


@pytest.mark.parametrize("method", ["grid", "asha", "pbt"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_trial_whose_files_were_deleted_a_moment_ago_starts_later(
    training: Training,
    owner: User,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    number: int,
) -> None:
    """It was refused for good; a sweep without another trial failed."""
    sweep = started(owner, method=method, parallel=2, **OF_METHOD[method])
    original, refusals = runs.run_submit, [number]

    def submit(**fields: Any) -> Run:
        if refusals and fields["name"].endswith(f" {refusals[0]}"):
            refusals.pop()
            raise conflict("deleted", type="files-deleted", retry=True)
        return original(**fields)

    monkeypatch.setattr(runs, "run_submit", submit)
    sweeps_advance()
    sweep.refresh_from_db()
    assert not refusals and sweep.state == "running"
    sweeps_advance()
    trials = selectors.trials_of(sweep)
    assert [trial.state for trial in trials] == ["running", "running"]


def test_repeating_a_request_starts_one_sweep(owner: User) -> None:
    client = factories.api(owner)
    body = {"name": "once", "spec": SPEC, "parameters": {LR: {"values": [0.1]}}}
    for _ in range(2):
        answer = client.post(
            SWEEPS,
            json.dumps(body),
            content_type="application/json",
            headers={"Idempotency-Key": "k"},
        )
        assert answer.status_code == 201
    [listed] = client.get(SWEEPS).json()["items"]
    assert listed["budget"] == {"runs": 20, "device_hours": None}


def test_the_example_is_accepted(owner: User) -> None:
    body = (Path(__file__).resolve().parents[3] / "examples" / "sweep_asha.json").read_text()
    answer = factories.api(owner).post(SWEEPS, body, content_type="application/json")
    assert answer.status_code == 201, answer.content
