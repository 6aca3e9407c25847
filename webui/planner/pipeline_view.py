"""A plan's pipeline as a timeline: the planner's times of each stage, run through its event
simulator.

Knows terms by name and the simulator; knows no markup.
"""

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

_MOST_BLOCKS: Final = 160  # drawn in a row; beyond that fewer micro-batches are simulated
_MOST_WHOLE: Final = 1536
_MOST_STAGES: Final = 32


def pipeline_of(table: Table, plan: Mapping[str, Any]) -> Pipeline | None:
    """None for plans without a pipeline, and for those whose devices are too many to be seen."""
    return (
        pipeline(timeline_of(table, plan))
        if 2 <= int(plan.get("pp") or 1) <= _MOST_STAGES
        else None
    )


def more_terms(table: Table | None) -> dict[str, float]:
    """Terms of the page that an answer line has no place for, of the stage that has most."""
    names = ("parameter_server_bytes", "parameter_server_link_bytes")
    return {} if table is None else {name: float(np.max(table[name])) for name in names}


def timeline_of_run(run: Any, *, whole: bool) -> dict[str, Any] | None:
    """The predicted pipeline of a run, as plain numbers; None without a prediction or a pipeline.

    `whole`: up to `_MOST_WHOLE` blocks a row, for a timeline beside the measured one, which shows
    every micro-batch.
    """
    plan, predicted = run.plan or {}, run.prediction or {}
    spec = RunSpec.from_dict(run.spec) if predicted and run.kind == "train" else None
    if (
        spec is None
        or spec.shape is None
        or spec.train is None
        or not 2 <= int(plan.get("pp") or 1) <= _MOST_STAGES
    ):
        return None
    line = {
        "model": spec.shape.to_dict(),
        "plan": plan,
        "cluster": predicted["cluster"],
        "workload": {"seq_len": spec.train.seq_len},
        "framework": predicted["framework"],
    }
    asked = api.parse_line(line)
    if asked.request is None:
        return None
    return timeline_of(
        build_table([asked.request]), plan, most=_MOST_WHOLE if whole else _MOST_BLOCKS
    )


def timeline_of(
    table: Table, plan: Mapping[str, Any], *, most: int = _MOST_BLOCKS
) -> dict[str, Any]:
    """The plan's timeline from the terms of its table (one row, every stage).

    A stage's time for one micro-batch is parted as the layers' is: forward by `dense_forward_s`,
    the recomputed forward
    into the input gradient, what is left in equal halves. Simulated are as many micro-batches as
    can be drawn.
    """
    pp, virtual = int(plan["pp"]), int(plan.get("virtual_stages") or 1)
    schedule = str(plan.get("schedule") or "1f1b")
    rounds = max(
        1, int(plan["global_batch_size"]) // (int(plan["dp"]) * int(plan["micro_batch_size"]))
    )
    whole = np.asarray(table.column("stage_time_s"), float).reshape(-1)[:pp] / virtual
    share = float(
        np.clip(
            _one(table, "dense_forward_s") / max(_one(table, "dense_layer_s"), 1e-12), 0.05, 0.6
        )
    )
    forward = whole * share
    again = forward if plan.get("recompute") == "full" else 0.0 * forward
    weight = np.maximum(whole - forward - again, 0.0) / 2
    stages = [device_of_stage(schedule, pp, stage) for stage in range(pp * virtual)]
    shown = rounds
    if virtual * rounds * 3 > most:
        turn = 2 * pp if schedule == "dualpipev" else pp
        shown = min(rounds, max(turn, most // (3 * virtual) // turn * turn))
    ran = simulate(
        schedule,
        pp,
        shown,
        forward_s=forward[stages],
        backward_s=(again + weight)[stages],
        weight_s=weight[stages],
        virtual_stages=virtual,
        hop_s=_one(table, "hop_s"),
    )
    return {
        **timeline(ran, shown),
        "of": rounds,
        "predicted_bubble": _one(table, "bubble_fraction"),
    }


def _one(table: Table, name: str) -> float:
    return float(np.asarray(table.column(name)).reshape(-1)[0])
