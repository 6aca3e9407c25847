"""Trials of a run as a table, for pages and REST, and as measurement lines for the planner."""

from __future__ import annotations

from typing import Any

from orchestrator.runs.models import Run
from orchestrator.runs.plan_trials.models import PlanTrials
from workers.contracts import ModelSpec, RunSpec


def trials_of(*, run: Run) -> dict[str, Any] | None:
    """`{rows, settings, chosen, reason, current, spent_s, seconds_by_attempt, nodes, decided}`.

    A row is `{rank, plan, state: waiting | trying | measured | slower | failed | not_tried,
    predicted_s, predicted_low_s, predicted_high_s, predicted_bytes, step_time_s?, low_s?, high_s?,
    measured_rank?, steps, visits, peak_bytes?, seconds, message, exit_class?}`; ranks count from 1.
    None for a run without trials.
    """
    row = PlanTrials.objects.filter(run=run).first() if run.spec.get("autotune") else None
    if row is None:
        return None
    current = row.unfinished.get(str(run.attempt_number)) if row.decided is None else None
    alive = run.state in ("queued", "starting", "running", "stopping", "paused")
    timed = sorted(
        (result["step_time_s"], int(index))
        for index, result in row.results.items()
        if result["state"] != "failed" and result.get("step_time_s")
    )
    ranks = {index: rank for rank, (_, index) in enumerate(timed, start=1)}
    rows = []
    for index, candidate in enumerate(row.candidates):
        prediction = candidate["prediction"]
        result = row.results.get(str(index))
        waits = "waiting" if row.decided is None and alive else "not_tried"
        state = result["state"] if result else waits
        rows.append(
            {
                "rank": index + 1,
                "plan": candidate["plan"],
                "predicted_s": prediction["step_time_s"],
                "predicted_low_s": prediction.get("step_time_low_s"),
                "predicted_high_s": prediction.get("step_time_high_s"),
                "predicted_bytes": prediction["memory"]["total_bytes"],
                "steps": 0,
                "visits": 0,
                "seconds": 0.0,
                "message": "",
                **{k: v for k, v in (result or {}).items() if k != "index"},
                "state": "trying" if index == current and alive else state,
                "measured_rank": ranks.get(index),
                "chosen": index == row.chosen,
            }
        )
    return {
        "rows": rows,
        "settings": row.settings,
        "chosen": None if row.chosen is None else row.chosen + 1,
        "reason": row.reason,
        "current": None if current is None or not alive else current + 1,
        "spent_s": row.spent_s,
        "nodes": row.nodes,
        "decided": row.decided,
    }


def periods_of(*, run: Run) -> dict[int, tuple[float, float | None]]:
    """When the trials of each attempt began and ended, in Unix seconds; None: with the attempt."""
    if not run.spec.get("autotune"):
        return {}
    row = PlanTrials.objects.filter(run=run).only("periods").first()
    periods = row.periods if row is not None else {}
    return {int(number): (began, ended) for number, (began, ended) in periods.items()}


def trial_lines(*, run: Run) -> list[dict[str, Any]]:
    """A measurement line per plan that was tried, for calibration; empty without trials."""
    row = PlanTrials.objects.filter(run=run).first() if run.spec.get("autotune") else None
    if row is None or not row.results:
        return []
    spec = RunSpec.from_dict(run.spec)
    shape: ModelSpec | None = spec.shape
    if spec.train is None or shape is None:
        return []
    lines = []
    for index, result in sorted(row.results.items(), key=lambda item: int(item[0])):
        candidate = row.candidates[int(index)]
        prediction = candidate["prediction"]
        measured: dict[str, Any] = {}
        if result.get("exit_class") == "out_of_memory":
            measured = {"out_of_memory": True}
        elif result["state"] != "failed" and result.get("step_time_s"):
            measured = {"step_time_s": result["step_time_s"]}
            # a CPU's peak is the sum of its tensors, not the process's peak
            if prediction.get("device") != "cpu" and result.get("peak_bytes"):
                measured["peak_bytes"] = result["peak_bytes"]
        if not measured:
            continue
        lines.append(
            {
                "id": f"run-{run.pk} trial-{int(index) + 1}",
                "model": shape.to_dict(),
                "plan": candidate["plan"],
                "cluster": prediction["cluster"],
                "workload": {"seq_len": spec.train.seq_len},
                "framework": prediction["framework"],
                "source": f"run {run.pk}, trial of plan {int(index) + 1}",
                "measured": measured,
            }
        )
    return lines
