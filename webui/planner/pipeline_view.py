"""Predicted pipeline timeline of a plan, simulated from the planner's stage times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from orchestrator.planner import api
from orchestrator.planner.answers import build_table
from orchestrator.planner.model.terms import Table
from orchestrator.planner.schedules.orders import device_of_stage
from orchestrator.planner.schedules.simulate import simulate
from orchestrator.planner.schedules.timeline import timeline
from webui.planner.charts.pipeline import Pipeline, pipeline
from workers.contracts import RunSpec

_MAX_BLOCKS: Final = 160  # per row; fewer micro-batches are simulated above this
_MAX_BLOCKS_FULL: Final = 1536
_MAX_STAGES: Final = 32


def pipeline_chart(table: Table, plan: Mapping[str, Any]) -> Pipeline | None:
    """Returns None without a pipeline or with too many stages to draw."""
    return (
        pipeline(timeline_of(table, plan)) if 2 <= int(plan.get("pp") or 1) <= _MAX_STAGES else None
    )


def more_terms(table: Table | None) -> dict[str, float]:
    """Returns terms that an answer line lacks: the maximum over stages."""
    names = ("parameter_server_bytes", "parameter_server_link_bytes")
    return {} if table is None else {name: float(np.max(table[name])) for name in names}


def timeline_of_run(run: Any, *, whole: bool) -> dict[str, Any] | None:
    """Returns the predicted timeline of a run; None without a prediction or a pipeline.

    `whole`: up to `_MAX_BLOCKS_FULL` blocks per row, to compare it with the measured timeline.
    """
    plan, predicted = run.plan or {}, run.prediction or {}
    spec = RunSpec.from_dict(run.spec) if predicted and run.kind == "train" else None
    if (
        spec is None
        or spec.shape is None
        or spec.train is None
        or not 2 <= int(plan.get("pp") or 1) <= _MAX_STAGES
    ):
        return None
    line = {
        "model": spec.shape.to_dict(),
        "plan": plan,
        "cluster": predicted["cluster"],
        "workload": {"seq_len": spec.train.seq_len},
        "framework": predicted["framework"],
    }
    parsed = api.parse_line(line)
    if parsed.request is None:
        return None
    return timeline_of(
        build_table([parsed.request]), plan, most=_MAX_BLOCKS_FULL if whole else _MAX_BLOCKS
    )


def timeline_of(
    table: Table, plan: Mapping[str, Any], *, most: int = _MAX_BLOCKS
) -> dict[str, Any]:
    """Returns the timeline of a plan from its term table (one row, all stages).

    Splits a stage's time per micro-batch in the proportions of its layers: forward by
    `dense_forward_s`, the recomputed forward as part of the input gradient, the rest in equal
    halves. Simulates as many micro-batches as can be drawn.
    """
    pp, virtual = int(plan["pp"]), int(plan.get("virtual_stages") or 1)
    schedule = str(plan.get("schedule") or "1f1b")
    rounds = max(
        1, int(plan["global_batch_size"]) // (int(plan["dp"]) * int(plan["micro_batch_size"]))
    )
    stage_time = np.asarray(table.column("stage_time_s"), float).reshape(-1)[:pp] / virtual
    share = float(
        np.clip(
            _scalar(table, "dense_forward_s") / max(_scalar(table, "dense_layer_s"), 1e-12),
            0.05,
            0.6,
        )
    )
    forward = stage_time * share
    recomputed = forward if plan.get("recompute") == "full" else 0.0 * forward
    weight = np.maximum(stage_time - forward - recomputed, 0.0) / 2
    stages = [device_of_stage(schedule, pp, stage) for stage in range(pp * virtual)]
    shown = rounds
    if virtual * rounds * 3 > most:
        period = 2 * pp if schedule == "dualpipev" else pp
        shown = min(rounds, max(period, most // (3 * virtual) // period * period))
    simulation = simulate(
        schedule,
        pp,
        shown,
        forward_s=forward[stages],
        backward_s=(recomputed + weight)[stages],
        weight_s=weight[stages],
        virtual_stages=virtual,
        hop_s=_scalar(table, "hop_s"),
    )
    return {
        **timeline(simulation, shown),
        "of": rounds,
        "predicted_bubble": _scalar(table, "bubble_fraction"),
    }


def _scalar(table: Table, name: str) -> float:
    return float(np.asarray(table.column(name)).reshape(-1)[0])
