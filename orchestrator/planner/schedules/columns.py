"""Pipeline time of many plans: closed forms if they hold, else the event simulator.

Does not depend on models, devices or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchestrator.planner.schedules.closed_form import FORMULAS, Columns, busy_s
from orchestrator.planner.schedules.orders import SCHEDULES, problem_of
from orchestrator.planner.schedules.program import Floats, Ints, duration_rows, end_times, program
from workers.contracts.specs.plan import INTERLEAVED, V_SHAPED

_IS_V_SHAPED = np.array([name in V_SHAPED for name in SCHEDULES])
_IS_INTERLEAVED = np.array([name in INTERLEAVED for name in SCHEDULES])
# rows whose columns fit in cache: 0.09 s per million rows on one core, 0.16 s without blocks
_BLOCK = 65536
_WIDTH = 256  # rows simulated at once: 200 MB for 10^5 operations


class StageTimes(NamedTuple):
    """Seconds of one stage per micro-batch: forward, input gradient, weight gradient.

    Columns or numbers. Recomputation belongs to the backward. Schedules that do not split the
    backward use the sum of the two.
    """

    forward_s: ArrayLike
    backward_s: ArrayLike
    weight_s: ArrayLike


NOTHING = StageTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class PipelineTime:
    """Seconds of one step per row.

    `makespan_s` from the first operation to the last, `busy_s` the mean work of a device.
    """

    makespan_s: Floats
    busy_s: Floats

    @property
    def bubble_s(self) -> Floats:
        """Idle seconds of a device."""
        return self.makespan_s - self.busy_s

    @property
    def bubble_fraction(self) -> Floats:
        """Idle share of all devices' time; 0 if the makespan is 0.

        1 - sum(busy) / (pp * makespan).
        """
        safe = np.where(self.makespan_s > 0, self.makespan_s, 1.0)
        return np.where(self.makespan_s > 0, self.bubble_s / safe, 0.0)


def pipeline_time(
    schedule: ArrayLike,
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    micro_batches: ArrayLike,
    regular: StageTimes,
    *,
    first: StageTimes = NOTHING,
    last: StageTimes = NOTHING,
    hop_s: ArrayLike = 0.0,
    overlap_s: ArrayLike = 0.0,
) -> PipelineTime:
    """Time of each row's step; all arguments broadcast to one dimension.

    schedule: indices into `SCHEDULES`. regular: one of the pp * virtual_stages stages; first and
    last: extra time of the first and last of them. hop_s: transfer to a stage on another device.
    overlap_s: what dualpipev saves per pair of a forward and a backward, at most the shorter of
    them.

    Exact for naive, gpipe, 1f1b and pipedream, and for every schedule with even stages and no hops.
    For the others the chains that bind in practice are counted: compared with the simulator, with a
    last stage up to 2.5 times as heavy, a first one 10% heavier and hops of up to 0.1 F, the error
    is 0.00% (interleaved_1f1b, zbv), 0.01% (zb1p) and 0.02% (dualpipev) on average and 1.1% at
    most; with hops of up to 3 F 0.01%, 0.2%, 1.0% and 0.3% on average, zb1p 8% at most. Rows whose
    closed form does not hold, zb1p with fewer micro-batches than devices and zbv with fewer than 2
    pp - 1, are simulated, rows of one pipeline together. Raises ValueError for a row that cannot
    run.
    """
    code, c = _columns(
        schedule, pp, virtual_stages, micro_batches, regular, first, last, hop_s, overlap_s
    )
    makespan, busy = np.zeros(code.shape), np.zeros(code.shape)
    simulated = np.zeros(code.shape, bool)
    for start in range(0, code.size, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, code.size))
        for index in np.unique(code[block]).tolist():
            name = SCHEDULES[index]
            formula, (times_p, plus) = FORMULAS[name]
            rows = block[code[block] == index]
            picked = _pick(c, rows)
            busy[rows] = busy_s(picked, name)
            makespan[rows] = np.where(picked.p > 1, formula(picked), busy[rows])
            simulated[rows] = (picked.p > 1) & (picked.m < times_p * picked.p + plus)
    rows = np.flatnonzero(simulated)
    if rows.size:
        makespan[rows] = _simulated(code[rows], _pick(c, rows))
    return PipelineTime(makespan, busy)


def _columns(
    schedule: ArrayLike,
    pp: ArrayLike,
    virtual_stages: ArrayLike,
    micro_batches: ArrayLike,
    regular: StageTimes,
    first: StageTimes,
    last: StageTimes,
    hop_s: ArrayLike,
    overlap_s: ArrayLike,
) -> tuple[Ints, Columns]:
    """Schedule indices of all rows, other columns; ValueError if a row cannot run."""
    p, v, m = (np.atleast_1d(np.asarray(a, np.int64)) for a in (pp, virtual_stages, micro_batches))
    times = [
        np.atleast_1d(np.asarray(a, np.float64))
        for a in (*regular, *first, *last, hop_s, overlap_s)
    ]
    code = np.atleast_1d(np.asarray(schedule, np.int64))
    code = np.broadcast_to(code, np.broadcast_shapes(*(a.shape for a in (code, p, v, m, *times))))
    for row in np.flatnonzero(_invalid(code, p, v, m))[:1].tolist():
        if not 0 <= code[row] < len(SCHEDULES):
            raise ValueError(
                f"schedule index {code[row]} is not below {len(SCHEDULES)}: {', '.join(SCHEDULES)}"
            )
        raise ValueError(
            problem_of(
                SCHEDULES[code[row]], *(int(np.broadcast_to(a, code.shape)[row]) for a in (p, v, m))
            )
        )
    return code, Columns(p, v, m, *times)


def _invalid(code: Ints, p: Ints, v: Ints, m: Ints) -> NDArray[np.bool_]:
    """Rows for which `problem_of` returns a problem."""
    unknown = (code < 0) | (code >= len(SCHEDULES))
    at = np.where(unknown, 0, code)
    unequal = m % np.maximum(1, m // np.maximum(p, 1)) != 0
    stages = np.where(
        _IS_V_SHAPED[at], v != 2, np.where(_IS_INTERLEAVED[at], (v < 2) | unequal, v != 1)
    )
    few = (at == SCHEDULES.index("dualpipev")) & (m < 2 * p)
    return np.asarray(unknown | (p < 1) | (v < 1) | (m < 1) | stages | few)


def _pick(c: Columns, rows: Ints) -> Columns:
    return Columns(*(column if column.size == 1 else column[rows] for column in vars(c).values()))


def _simulated(code: Ints, c: Columns) -> Floats:
    """Makespans from the event simulator, rows of one pipeline at a time."""
    c = Columns(*(np.broadcast_to(column, code.shape) for column in vars(c).values()))
    out = np.zeros(code.shape)
    pipelines, which = np.unique(np.stack([code, c.p, c.v, c.m]), axis=1, return_inverse=True)
    for number, (index, p, v, m) in enumerate(pipelines.T.tolist()):
        run = program(SCHEDULES[index], p, v, m)
        rows = np.flatnonzero(which.reshape(-1) == number)
        for start in range(0, rows.size, _WIDTH):
            at = rows[start : start + _WIDTH]
            picked = _pick(c, at) if c.p.size > 1 else c
            forward = _stages(run.stages, picked.f, picked.xf, picked.yf)
            backward = _stages(run.stages, picked.b, picked.xb, picked.yb)
            weight = _stages(run.stages, picked.w, picked.xw, picked.yw)
            hop = np.repeat(picked.h[None], run.stages + 1, 0)
            hop[-1] = 0.0
            out[at] = end_times(run, duration_rows(forward, backward, weight, picked.o), hop).max(0)
    return out


def _stages(count: int, regular: Floats, first: Floats, last: Floats) -> Floats:
    stages = np.repeat(regular[None], count, 0)
    stages[0] += first
    stages[-1] += last
    return stages
