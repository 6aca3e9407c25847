"""Comparison of predicted and measured numbers, recorded misses, and measurements to calibrate."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.planner.request_parsing import parse_line
from orchestrator.runs import selectors, services
from orchestrator.runs.models import Run
from orchestrator.scheduling.reports import attempt_end
from orchestrator.telemetry.outcome import comparisons, measured, measurement_line, misses_record
from orchestrator.telemetry.services import points_store
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.events import events_write
from tests import factories
from tests.orchestrator.telemetry.conftest import batch_of
from workers.contracts.wire.points import RunEvent

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(owner: User) -> Run:
    """A running run on two ranks."""
    made = factories.run(owner, devices=2)
    factories.running(made, factories.node("n1"))
    return made


def log(
    run: Run, *, steps: int = 20, slower: float = 1.0, params: float = 1.0, ranks: int = 2
) -> None:
    prediction = run.prediction
    memory = prediction["memory"]
    for rank in range(ranks):
        weights = memory["params_bytes"] * params - rank
        points = batch_of(
            run,
            range(1, steps + 1),
            rank=rank,
            step_time_s=lambda step: prediction["step_time_s"] * (slower if step > 5 else 50.0),
            tokens_per_s=lambda step: prediction["tokens_per_s"] / slower,
            mfu=lambda step: 0.5,
            **{
                "memory/params_bytes": lambda step, size=weights: size,
                "memory/activations_bytes": lambda step: prediction["largest_bytes"]["activations"],
                "memory/allocated_bytes": lambda step: memory["total_bytes"] * params,
            },
        )
        points_store(run=run, attempt=1, batches=[points])


def missed(run: Run) -> dict[str, Any]:
    return {
        event.data["metric"]: event.data
        for event in selectors.events_of(run=run, types=["prediction_missed"])
    }


def test_a_run_as_predicted_records_no_miss(run: Run) -> None:
    log(run, slower=1.05)
    by_metric = {item.metric: item for item in comparisons(run=run)}
    assert by_metric["step_time_s"].ratio == pytest.approx(1.05) and by_metric[
        "tokens_per_s"
    ].ratio == pytest.approx(1 / 1.05)
    assert (
        by_metric["memory/params_bytes"].ratio == by_metric["memory/activations_bytes"].ratio == 1
    )
    total = by_metric["memory/allocated_bytes"]
    assert total.predicted == run.prediction["memory"]["total_bytes"] == total.measured
    assert total.predicted > 3e8, "a process on a CPU also holds Python and its libraries"
    assert misses_record(run=run, attempt=1) == 0 and not missed(run)


def test_a_miss_is_recorded_once_per_attempt(run: Run) -> None:
    log(run, slower=1.5, params=2.0)
    attempt = run.attempts.get()
    attempt_end.node_exited(
        attempt, node="n1", report={"class": "ok", "reason": "done", "time": 1.0}
    )
    misses = missed(run)
    assert set(misses) == {
        "step_time_s",
        "tokens_per_s",
        "memory/params_bytes",
        "memory/allocated_bytes",
        "wall_clock_s",
    }
    step = misses["step_time_s"]
    assert set(step) == {"metric", "predicted", "measured", "ratio", "calibration"}
    assert (
        step["ratio"] == pytest.approx(1.5) == pytest.approx(step["measured"] / step["predicted"])
    )
    assert misses_record(run=run, attempt=1) == 0 and len(missed(run)) == 5


def test_a_prediction_without_the_process_is_not_compared_in_total(run: Run) -> None:
    log(run)
    run.prediction["memory"] |= {"unattributed_bytes": 0, "total_bytes": 4e7}
    assert "memory/allocated_bytes" not in {item.metric for item in comparisons(run=run)}


def test_running_out_of_memory_against_the_prediction_is_a_miss(run: Run) -> None:
    assert misses_record(run=run, attempt=1, exit_class="out_of_memory") == 1
    assert missed(run)["fits"]["out_of_memory"] is True


def test_too_few_steps_are_not_compared(run: Run) -> None:
    log(run, steps=12)
    assert measured(run=run) is None and comparisons(run=run) == []
    assert misses_record(run=run, attempt=1) == 0


def test_an_ended_run_is_a_measurement(run: Run) -> None:
    log(run, slower=1.5)
    assert "wait" in str(measurement_line(run=run))
    attempt_end.node_exited(
        run.attempts.get(), node="n1", report={"class": "ok", "reason": "done", "time": 1.0}
    )
    run.refresh_from_db()
    line = measurement_line(run=run)
    assert isinstance(line, dict) and line["measured"]["step_time_s"] == pytest.approx(
        1.5 * run.prediction["step_time_s"]
    )
    parsed = parse_line(line)
    assert (
        parsed.request is not None
        and parsed.request.plan.dp == 2
        and parsed.request.framework.name == "orrery"
    )
    assert isinstance(
        measurement_line(
            run=services.run_submit(owner=run.owner, name="x", spec={"kind": "external"})
        ),
        str,
    )


def test_predicted_and_measured_mfu_have_one_peak(run: Run) -> None:
    """As on a machine whose probe measured less than half of the peak of the run's ranks."""
    first = dict(run.prediction)
    peak = 2.1 * first["peak_tflops"]
    writer = Writer(run.pk, 1, 0)

    def measured_peak(seq: int, tflops: float, precision: str) -> None:
        data = {"tflops": tflops, "precision": precision, "source": "matrix product"}
        event = RunEvent(
            run=str(run.pk), attempt=1, seq=seq, time=1e9, type="peak_measured", data=data
        )
        events_write({run.pk: run}, [(writer, [event])])
        run.refresh_from_db()

    measured_peak(1, 99.0, "fp16")  # not the run's precision
    assert run.prediction == first
    measured_peak(2, peak, "fp32")
    assert run.prediction["peak_tflops"] == peak
    assert run.prediction["mfu"] == pytest.approx(first["mfu"] / 2.1)
    assert run.prediction["hfu"] == pytest.approx(first["hfu"] / 2.1)
    assert run.prediction["step_time_s"] == first["step_time_s"]
    per_token = first["tflops_per_device"] / first["tokens_per_s"]
    points = batch_of(
        run,
        range(1, 31),
        step_time_s=lambda step: first["step_time_s"] / 0.92,
        tokens_per_s=lambda step: 0.92 * first["tokens_per_s"],
        mfu=lambda step: 0.92 * first["tokens_per_s"] * per_token / peak,
    )
    points_store(run=run, attempt=1, batches=[points])
    ratios = {each.metric: each.ratio for each in comparisons(run=run)}
    assert ratios["tokens_per_s"] == pytest.approx(ratios["mfu"]) == pytest.approx(0.92)


@pytest.mark.parametrize(
    "tflops",
    [10**400, float("inf"), float("nan"), True, "9", -1, 1e7, None],
    ids=lambda value: repr(value)[:8],
)
def test_an_invalid_peak_changes_no_prediction(run: Run, tflops: Any) -> None:
    first = dict(run.prediction)
    data = {"tflops": tflops, "precision": "fp32"}
    event = RunEvent(run=str(run.pk), attempt=1, seq=1, time=1e9, type="peak_measured", data=data)
    events_write({run.pk: run}, [(Writer(run.pk, 1, 0), [event])])
    run.refresh_from_db()
    assert run.prediction == first
    stored = run.events.get(type="invalid_event").data
    assert stored["type"] == "peak_measured" and stored["problem"].startswith("tflops: ")
