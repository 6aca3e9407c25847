"""The event simulator on whole columns: the reference of the closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.planner.schedules import columns
from orchestrator.planner.schedules.closed_form import busy_s, pipedream
from orchestrator.planner.schedules.columns import NOTHING, PipelineTime, StageTimes
from orchestrator.planner.schedules.orders import SCHEDULES


def simulated_time(
    schedule: Any,
    pp: Any,
    virtual_stages: Any,
    micro_batches: Any,
    regular: StageTimes,
    *,
    first: StageTimes = NOTHING,
    last: StageTimes = NOTHING,
    hop_s: Any = 0.0,
    overlap_s: Any = 0.0,
) -> PipelineTime:
    """`pipeline_time` with every row simulated."""
    code, c = columns._columns(
        schedule, pp, virtual_stages, micro_batches, regular, first, last, hop_s, overlap_s
    )
    makespan, busy = np.zeros(code.shape), np.zeros(code.shape)
    for index in np.unique(code).tolist():
        rows = np.flatnonzero(code == index)
        here = columns._pick(c, rows)
        busy[rows] = busy_s(here, SCHEDULES[index])
        steady = SCHEDULES[index] == "pipedream"
        ran = pipedream(here) if steady else columns._simulated(code[rows], here)
        makespan[rows] = np.where(here.p > 1, ran, busy[rows]) if steady else ran
    return PipelineTime(makespan, busy)
