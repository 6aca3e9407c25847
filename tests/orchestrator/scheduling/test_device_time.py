"""Device time of ended attempts: figures add up, and each cause is computed from recorded facts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from orchestrator.scheduling import selectors
from orchestrator.scheduling.accounting import ledger
from orchestrator.scheduling.accounting.split import CAUSES, AttemptTimes, split
from orchestrator.scheduling.models import DeviceTime
from orchestrator.telemetry.models import Cursor
from tests import factories
from workers.contracts.exit_classes import ExitClass

_TIMES = st.floats(0.0, 1e6)
_OPTIONAL = st.none() | _TIMES


@given(
    devices=st.integers(0, 4096),
    created=_TIMES,
    ended=_TIMES,
    exit_class=st.sampled_from([*map(str, ExitClass), ""]),
    queued=_OPTIONAL,
    started=_OPTIONAL,
    first=_OPTIONAL,
    last=_OPTIONAL,
    retained=_OPTIONAL,
)
def test_productive_and_lost_time_add_up_to_the_allocated_time(
    devices: int,
    created: float,
    ended: float,
    exit_class: str,
    queued: float | None,
    started: float | None,
    first: float | None,
    last: float | None,
    retained: float | None,
) -> None:
    result = split(
        AttemptTimes(devices, created, ended, exit_class, queued, started, first, last, retained)
    )
    assert set(result.lost) == set(CAUSES)
    assert result.productive >= 0 and min(result.lost.values()) >= 0 and result.queued >= 0
    assert result.allocated == devices * max(0.0, ended - created)
    total = result.productive + sum(result.lost.values())
    assert total == pytest.approx(result.allocated, rel=1e-9, abs=1e-3 * (devices + 1))


@pytest.mark.parametrize(
    ("exit_class", "cause"),
    [
        ("hang", "hang"),
        ("lost", "node"),
        ("preempted", "preemption"),
        ("infrastructure", "restart"),
        ("user_error", "restart"),
        ("ok", None),
        ("cancelled", None),
    ],
)
def test_the_time_after_the_last_step_counts_for_the_exit_class(
    exit_class: str, cause: str | None
) -> None:
    result = split(AttemptTimes(2, 100, 200, exit_class, 90, 105, 110, 160, 160))
    expected = dict.fromkeys(CAUSES, 0.0) | {"startup": 20.0}
    if cause is not None:
        expected[cause] += 80.0
    assert result.lost == expected
    assert result.productive == (100.0 if cause else 180.0)
    assert result.queued == 20.0


@pytest.mark.parametrize(
    ("first_work", "trials", "expected"),
    [
        (150, (105, 140), {"startup": 30.0, "trials": 70.0}),
        # the attempt ended while plans were tried: nothing of it was productive
        (None, (105, 200), {"startup": 10.0, "trials": 190.0}),
        (150, None, {"startup": 100.0}),
    ],
)
def test_trials_of_plans_are_a_cause_of_their_own(
    first_work: float | None, trials: tuple[float, float] | None, expected: dict[str, float]
) -> None:
    facts = AttemptTimes(2, 100, 200, "cancelled", 90, 104, first_work, None, 200, trials)
    result = split(facts)
    assert {cause: lost for cause, lost in result.lost.items() if lost} == expected
    assert result.productive == 200.0 - sum(expected.values())


@pytest.fixture
def run(db: None) -> Run:
    return factories.run(factories.user("ada"), devices=2)


def _attempt(run: Run, start: float, resume: int | None = None) -> Attempt:
    """An attempt that was placed `start` s after the run's creation and started 10 s later."""
    resume_from = {"path": f"checkpoints/step-{resume}", "step": resume} if resume else None
    run.refresh_from_db()
    attempt = runs.attempt_create(
        run=run,
        placement=[{"node": "n1", "address": "n1", "devices": [0, 1], "node_rank": 0}],
        resume_from=resume_from,
    )
    assert attempt is not None
    runs.attempt_running(attempt=attempt)
    created = run.created + timedelta(seconds=start)
    Attempt.objects.filter(pk=attempt.pk).update(
        created=created, started=created + timedelta(seconds=10), queued=created
    )
    attempt.refresh_from_db()
    return attempt


def _end(attempt: Attempt, after: float, exit_class: str, last_work: float) -> None:
    base = attempt.created.timestamp()
    Cursor.objects.create(
        run=attempt.run,
        attempt=attempt.number,
        rank=0,
        stream="points",
        last_time=base + last_work,
        latest='{"loss": [9, 1.0]}',
    )
    runs.attempt_exited(attempt=attempt, exit_class=exit_class)
    Run.objects.filter(pk=attempt.run_id).update(not_before=None)
    Attempt.objects.filter(pk=attempt.pk).update(ended=attempt.created + timedelta(seconds=after))


def _saved(attempt: Attempt, step: int, at: float) -> None:
    runs.event_record(
        run=attempt.run,
        type="checkpoint_saved",
        data={"step": step},
        attempt=attempt.number,
        time=attempt.created.timestamp() + at,
    )


def _times(attempt: Attempt) -> dict[str, float]:
    row = DeviceTime.objects.get(attempt=attempt)
    lost = {cause: getattr(row, cause) for cause in CAUSES if getattr(row, cause)}
    assert row.productive + sum(lost.values()) == pytest.approx(row.allocated)
    return {"productive": row.productive, **lost}


def _settle(last: Attempt, later: float = 5.0) -> int:
    last.refresh_from_db()
    assert last.ended is not None
    return ledger.settle(now=last.ended + timedelta(seconds=later))


def _near(**expected: float) -> Any:
    return pytest.approx(expected, abs=0.01)


def test_work_since_the_checkpoint_is_lost_by_restart_and_silence_by_hang(run: Run) -> None:
    attempt = _attempt(run, 0)
    _saved(attempt, 5, 40)
    _end(attempt, 160, "hang", last_work=60)
    assert _settle(attempt, 1.0) == 0, "its last points may still arrive"
    assert _settle(attempt) == 1
    # no point's time is stored here, so the first work is the last one: see the next test
    times = _times(attempt)
    assert times["hang"] == pytest.approx(200, abs=0.01)
    assert _settle(attempt) == 0, "stored once"
    assert _settle(attempt, 901.0) == 1, "once more when no point can arrive"
    assert _settle(attempt, 901.0) == 0


def test_a_later_attempt_that_repeats_steps_moves_them_to_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work_from(monkeypatch, 20.0)
    first = _attempt(run, 0)
    _saved(first, 5, 40)
    _saved(first, 9, 55)
    _end(first, 100, "lost", last_work=60)
    _settle(first)
    assert _times(first) == _near(productive=70, startup=40, restart=10, node=80)
    second = _attempt(run, 100, resume=5)  # the checkpoint of step 9 was on the lost node
    _end(second, 50, "ok", last_work=45)
    _settle(second)
    assert _times(first) == _near(productive=40, startup=40, restart=40, node=80)
    assert _times(second) == _near(productive=60, startup=40)
    total, _ = selectors.device_time_of_run(run)
    assert total is not None
    assert total.productive + sum(total.lost.values()) == pytest.approx(total.allocated)


def test_a_pause_by_a_user_is_no_preemption(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _work_from(monkeypatch, 20.0)
    attempt = _attempt(run, 0)
    run.refresh_from_db()
    runs.run_pause(run=run, by=run.owner)
    _saved(attempt, 5, 60)
    attempt.refresh_from_db()
    _end(attempt, 65, "preempted", last_work=60)
    _settle(attempt)
    assert _times(attempt) == _near(productive=90, startup=40)


def test_a_rewind_by_a_user_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _work_from(monkeypatch, 20.0)
    first = _attempt(run, 0)
    _end(first, 60, "ok", last_work=60)
    _settle(first)
    Run.objects.filter(pk=run.pk).update(state="queued", rewinds=[[1, 5]])
    second = _attempt(run, 100, resume=5)
    _end(second, 60, "ok", last_work=60)
    _settle(second)
    assert _times(first) == _near(productive=80, startup=40)


def _work_from(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The first logged step of each attempt starts that long after its placement."""

    def first(run: Run, number: int, name: str) -> float:
        return Attempt.objects.get(run=run, number=number).created.timestamp() + seconds

    monkeypatch.setattr("orchestrator.telemetry.reading.progress._first", first)


def test_an_attempt_that_never_worked_is_startup(run: Run) -> None:
    attempt = _attempt(run, 0)
    Attempt.objects.filter(pk=attempt.pk).update(started=None)
    runs.attempt_exited(attempt=attempt, exit_class="user_error")
    _settle(attempt)
    row = DeviceTime.objects.get(attempt=attempt)
    assert row.startup == row.allocated


def test_rest_metrics_and_pages_show_device_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _work_from(monkeypatch, 20.0)
    attempt = _attempt(run, 0)
    _saved(attempt, 5, 40)
    api = factories.api(run.owner, scopes=["read"])
    path = f"/api/v1/runs/{run.pk}"
    assert api.get(path).json()["device_time"] is None
    assert api.get(f"{path}/attempts").json()["items"][0]["device_time"] is None
    _end(attempt, 100, "hang", last_work=60)
    _settle(attempt)
    expected = {
        "allocated_s": 200.0,
        "productive_s": 40.0,
        "lost_s": {
            "startup": 40.0,
            "trials": 0,
            "restart": 40.0,
            "hang": 80.0,
            "node": 0,
            "preemption": 0,
        },
        "queued_s": 0.0,
        "final": False,
    }
    answer = api.get(path).json()["device_time"]
    answer["lost_s"] = {cause: round(value) for cause, value in answer["lost_s"].items()}
    assert answer | {"productive_s": round(answer["productive_s"])} == expected
    of_attempt = api.get(f"{path}/attempts").json()["items"][0]["device_time"]
    assert of_attempt["allocated_s"] == 200.0
    metric = 'orrery_lost_device_seconds_total{cause="hang"}'
    assert f"{metric} 0.0" in Client().get("/metrics").text, "not final yet"
    _settle(attempt, 901.0)
    value = Client().get("/metrics").text.split(f"{metric} ")[1].split()[0]
    assert float(value) == pytest.approx(80, abs=0.01)
    browser = factories.client_for(run.owner)
    for page in (f"/runs/{run.pk}/?tab=history", "/"):
        text = browser.get(page).text
        assert "Device time" in text
        assert "restart" in text
