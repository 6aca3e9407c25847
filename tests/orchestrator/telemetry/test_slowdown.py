"""Training below its predicted speed is recorded once, with the costliest cause first."""

from __future__ import annotations

import pytest

from orchestrator.accounts.models import User
from orchestrator.runs import selectors
from orchestrator.runs.models import Run
from orchestrator.telemetry.services import points_store
from orchestrator.telemetry.slowdown import slowdown_record
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(owner: User) -> Run:
    made = factories.run(owner, devices=2)
    factories.running(made, factories.node("n1"))
    return made


def log(run: Run, *, slower: float, steps: int = 40, **parts: float) -> None:
    """Log points; `parts` are shares of a step by kind."""
    prediction = run.prediction
    step_s = prediction["step_time_s"] * slower
    names = {"data": "time/data_s", "exposed": "comm/exposed_s", "late": "comm/arrival_skew_s"}
    for rank in range(2):
        series = {
            names[part]: lambda step, share=share: share * step_s for part, share in parts.items()
        }
        points = batch_of(
            run,
            range(1, steps + 1),
            rank=rank,
            step_time_s=lambda step: step_s,
            tokens_per_s=lambda step: prediction["tokens_per_s"] / slower,
            **series,
        )
        points_store(run=run, attempt=1, batches=[points])


def test_the_likeliest_cause_comes_first_and_once(run: Run) -> None:
    log(run, slower=3.0, data=0.4, exposed=0.5, late=0.1)
    assert slowdown_record(run=run, attempt=1) is True
    assert slowdown_record(run=run, attempt=1) is False, "once per attempt"
    [event] = selectors.events_of(run=run, types=["slow"])
    assert event.data["ratio"] == pytest.approx(1 / 3) and event.data["metric"] == "tokens_per_s"
    causes = {cause["cause"]: cause["excess_s"] for cause in event.data["causes"]}
    assert next(iter(causes)) == "data" and "straggler" in causes
    assert list(causes.values()) == sorted(causes.values(), reverse=True)
    step_s = 3 * run.prediction["step_time_s"]
    assert causes["data"] == pytest.approx(0.4 * step_s) and causes["straggler"] == pytest.approx(
        0.1 * step_s
    )
    assert all(cause["message"].endswith(".") for cause in event.data["causes"])


def test_without_any_other_cause_it_is_computation(run: Run) -> None:
    log(run, slower=2.0)
    assert slowdown_record(run=run, attempt=1)
    [event] = selectors.events_of(run=run, types=["slow"])
    assert [cause["cause"] for cause in event.data["causes"]] == ["compute"]


@pytest.mark.parametrize(("slower", "steps", "answer"), [(1.2, 40, False), (3.0, 20, None)])
def test_a_good_speed_or_few_steps_record_nothing(
    run: Run, slower: float, steps: int, answer: bool | None
) -> None:
    log(run, slower=slower, steps=steps)
    assert slowdown_record(run=run, attempt=1) is answer
    assert not list(selectors.events_of(run=run, types=["slow"]))
