"""Builds answer lines from a table's columns.

Defines the shape of an answer; does not compute terms itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.planner.explain import (
    COLLECTIVES,
    COMM,
    COST,
    HOST,
    MEMORY,
    RATES,
    TIME,
    ExplainOptions,
    explain_answer,
    explain_terms,
)
from orchestrator.planner.model.inputs import Request, table_of
from orchestrator.planner.model.parameters import columns_for
from orchestrator.planner.model.terms import Column, Table
from orchestrator.planner.model.time.intervals import bounds, extrapolations
from orchestrator.planner.search.plan_notes import notes_by_plan

if TYPE_CHECKING:
    from orchestrator.planner.model.calibration_result import Calibration

_MAX_CELLS = 2**21  # (S, n) cells per table: 16 MiB per column


def answer_requests(
    requests: Sequence[Request],
    calibration: Calibration | None = None,
    explain: ExplainOptions | None = None,
) -> list[dict[str, Any]]:
    """One answer per legal request, in their order."""
    answers: list[dict[str, Any]] = [{}] * len(requests)
    for indices in _batches(requests):
        batch = [requests[index] for index in indices]
        table = build_table(batch, calibration)
        for index, answer in zip(
            indices, answer_table(table, batch, calibration, explain), strict=True
        ):
            answers[index] = answer
    return answers


def build_table(requests: Sequence[Request], calibration: Calibration | None = None) -> Table:
    """All terms of these plans, with every pipeline stage."""
    return table_of(requests, columns_for(requests, calibration))


def answer_table(
    table: Table,
    requests: Sequence[Request],
    calibration: Calibration | None = None,
    explain: ExplainOptions | None = None,
) -> list[dict[str, Any]]:
    """One answer per row of a table that holds every pipeline stage of the requests."""
    low, high = bounds(table, requests, calibration)
    answers = _answer_rows(table, [request.id for request in requests], low, high)
    warnings = extrapolations(table, requests, calibration)
    for request, answer, notes, warning in zip(
        requests, answers, notes_by_plan(requests, table), warnings, strict=True
    ):
        answer["notes"] = [*notes, *request.assumed, *([warning] if warning else [])]
    if explain is None:
        return answers
    if explain.names:
        return [
            {**answer, "explained": explain_terms(table, row, answer, explain)}
            for row, answer in enumerate(answers)
        ]
    return [explain_answer(table, row, answer, explain.depth) for row, answer in enumerate(answers)]


def refusal(id: Any, problems: Sequence[Any]) -> dict[str, Any]:
    """The answer to a line that cannot be estimated."""
    return {
        "id": id,
        "ok": False,
        "fits": False,
        "problems": [item.model_dump(by_alias=True) for item in problems],
    }


def _batches(requests: Sequence[Request]) -> Iterable[list[int]]:
    """Indices grouped by pipeline depth: a deep pipeline makes a table tall for all its plans."""
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault((request.plan.pp - 1).bit_length(), []).append(index)
    for depth, indices in groups.items():
        size = max(1, _MAX_CELLS >> depth)
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _answer_rows(
    table: Table, ids: Sequence[Any], low: Column, high: Column
) -> list[dict[str, Any]]:
    """`low` and `high` are `(n,)`: the 80% interval of the step time in seconds."""
    n, worst = table.n, table.column("worst_stage").astype(int)
    memory = {name: _at_stage(table, name, worst) for name in MEMORY}
    totals = ("total_bytes", "reserved_bytes", "capacity_bytes")
    names = (*totals, "step_time_s", *TIME, *RATES, *COMM, *COST, *HOST, *COLLECTIVES)
    flat = {name: table.column(name) for name in names}
    stages = _by_stage(table, "stage_total_bytes")
    pp, fits = table.column("pp").astype(int), table.column("fits")
    low, high = np.broadcast_to(low, n), np.broadcast_to(high, n)
    has_tokens = table.column("tokens") > 0
    has_collectives = table.column("collectives_known") > 0

    def floats(names: Sequence[str], row: int) -> dict[str, float | None]:
        return {name: _float(flat[name][row]) for name in names}

    def integers(
        names: Sequence[str], row: int, columns: Mapping[str, Column] = flat
    ) -> dict[str, int | None]:
        return {name: _integer(columns[name][row]) for name in names}

    answers = []
    for row in range(n):
        cost = floats(COST, row)
        if not has_tokens[row]:
            cost["days"] = None
        answers.append(
            {
                "id": ids[row],
                "ok": True,
                "problems": [],
                "fits": bool(fits[row]),
                "memory": {
                    **integers(MEMORY, row, memory),
                    **integers(totals, row),
                    "stage": int(worst[row]),
                    "per_stage_total_bytes": [_integer(item) for item in stages[: pp[row], row]],
                },
                "step_time_s": _float(flat["step_time_s"][row]),
                "step_time_low_s": _float(low[row]),
                "step_time_high_s": _float(high[row]),
                "time": floats(TIME, row),
                **floats(RATES, row),
                "comm": integers(COMM, row),
                "collectives": integers(COLLECTIVES, row) if has_collectives[row] else None,
                **cost,
                "host": integers(HOST, row),
            }
        )
    return answers


def _float(value: Any) -> float | None:
    """None for a number that is not finite, which JSON cannot hold."""
    number = float(value)
    return number if math.isfinite(number) else None


def _integer(value: Any) -> int | None:
    number = float(value)
    return round(number) if math.isfinite(number) else None


def _by_stage(table: Table, name: str) -> Column:
    """`(S, n)`, or `(1, n)` for a column that is the same on every stage."""
    column = table.column(name)
    return column if column.ndim == 2 else column[None, :]


def _at_stage(table: Table, name: str, stage: Column) -> Column:
    """The column `(n,)` at the given stage of each plan."""
    column = _by_stage(table, name)
    return np.asarray(column[np.minimum(stage, len(column) - 1), np.arange(table.n)])
