"""From a table's columns to answer lines, as numbers or as trees that explain them.

The one place that knows an answer's shape; computes nothing of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from orchestrator.planner.model.all_terms import TERMS
from orchestrator.planner.model.communication.engine_traffic import KINDS
from orchestrator.planner.model.terms import Column, Table, explain

MEMORY = (
    "params_bytes",
    "grads_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "buffers_bytes",
    "unattributed_bytes",
)
TIME = ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "other_s")
RATES = ("tokens_per_s_per_device", "tflops_per_device", "mfu", "hfu", "bubble_fraction")
COMM = ("dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes")
COLLECTIVES = tuple(f"{kind}_bytes" for kind in KINDS)
HOST = ("host_bytes", "host_capacity_bytes")
COST = ("usd_per_billion_tokens", "kwh_per_billion_tokens", "days")


def answers(table: Table, ids: Sequence[Any], low: Column, high: Column) -> list[dict[str, Any]]:
    """One answer a row.

    `low` and `high` are `(n,)`: an 80% interval of the step's time in seconds.
    """
    n, worst = table.n, table.column("worst_stage").astype(int)
    rows = np.arange(n)
    at_worst = {name: _by_stage(table, name)[_clipped(table, name, worst), rows] for name in MEMORY}
    flat = {
        name: table.column(name)
        for name in ("total_bytes", "capacity_bytes", "step_time_s", *TIME, *RATES, *COMM)
    }
    flat |= {name: table.column(name) for name in (*COST, *HOST, *COLLECTIVES)}
    stages, pp, fits = (
        _by_stage(table, "stage_total_bytes"),
        table.column("pp").astype(int),
        table.column("fits"),
    )
    low, high, has_tokens = (
        np.broadcast_to(low, n),
        np.broadcast_to(high, n),
        table.column("tokens") > 0,
    )
    counted = table.column("collectives_known") > 0

    def of(names: Sequence[str], row: int) -> dict[str, Any]:
        return {name: number(flat[name][row]) for name in names}

    found = []
    for row in range(n):
        cost = of(COST, row)
        if not has_tokens[row]:
            cost["days"] = None
        found.append(
            {
                "id": ids[row],
                "ok": True,
                "problems": [],
                "fits": bool(fits[row]),
                "memory": {
                    **{name: whole(at_worst[name][row]) for name in MEMORY},
                    "total_bytes": whole(flat["total_bytes"][row]),
                    "capacity_bytes": whole(flat["capacity_bytes"][row]),
                    "stage": int(worst[row]),
                    "per_stage_total_bytes": [whole(each) for each in stages[: pp[row], row]],
                },
                "step_time_s": number(flat["step_time_s"][row]),
                "step_time_low_s": number(low[row]),
                "step_time_high_s": number(high[row]),
                "time": of(TIME, row),
                **of(RATES, row),
                "comm": {name: whole(flat[name][row]) for name in COMM},
                "collectives": {name: whole(flat[name][row]) for name in COLLECTIVES}
                if counted[row]
                else None,
                **cost,
                "host": {name: whole(flat[name][row]) for name in HOST},
            }
        )
    return found


def refused(id: Any, problems: Sequence[Any]) -> dict[str, Any]:
    """The answer to a line that cannot be estimated."""
    return {
        "id": id,
        "ok": False,
        "fits": False,
        "problems": [item.model_dump(by_alias=True) for item in problems],
    }


def explained(
    table: Table, row: int, answer: dict[str, Any], depth: int | None = None
) -> dict[str, Any]:
    """The answer with a tree `{name, value, unit, formula, inputs, source}` in place of each
    number.

    Every tree reaches down to what is given, or `depth` levels; a term that stands in it twice
    shows its inputs the
    first time.
    """
    single = table.row(row)
    stage = answer["memory"]["stage"]

    def tree(name: str, at: int | None = None) -> dict[str, Any]:
        return _tree(single, name, at, set(), depth)

    def trees(
        names: Sequence[str], at: int | None = None, given: dict[str, Any] = answer
    ) -> dict[str, Any]:
        return {name: tree(name, at) if given[name] is not None else None for name in names}

    memory = {name: tree(name, stage) for name in (*MEMORY, "total_bytes", "capacity_bytes")}
    memory |= {"stage": tree("worst_stage"), "per_stage_total_bytes": tree("stage_total_bytes")}
    calls = answer["collectives"]
    return {
        **answer,
        "memory": memory,
        "step_time_s": tree("step_time_s"),
        **{name: _bound(single, name, answer, depth) for name in _BOUNDS},
        "time": trees(TIME, None, answer["time"]),
        **trees(RATES),
        "host": trees(HOST, None, answer["host"]),
        "comm": trees(COMM, None, answer["comm"]),
        **trees(COST),
        "collectives": calls and trees(COLLECTIVES, None, calls),
    }


def chosen_trees(
    table: Table, row: int, answer: dict[str, Any], names: Sequence[str], depth: int | None
) -> dict[str, Any]:
    """Trees under the terms of these names alone: `{name: tree}`.

    They are known, as `is_term` says.
    """
    single, stage = table.row(row), answer["memory"]["stage"]
    return {
        name: _bound(single, name, answer, depth)
        if name in _BOUNDS
        else _tree(single, name, stage, set(), depth)
        for name in names
    }


def is_term(name: str) -> bool:
    """Whether a number of that name can be explained: those of an answer, and every term that they
    rest on.
    """
    return name in TERMS.terms or name in TERMS.inputs or name in _BOUNDS


_BOUNDS = {"step_time_low_s": ("/", 10), "step_time_high_s": ("x", 90)}


def _bound(table: Table, name: str, answer: dict[str, Any], depth: int | None) -> dict[str, Any]:
    sign, percent = _BOUNDS[name]
    below = None if depth is None else depth - 1
    deep = depth is None or depth > 0
    return {
        "name": name,
        "value": answer[name],
        "unit": "s",
        "formula": f"step_time_s {sign} error_factor_80",
        "inputs": [_tree(table, "step_time_s", None, set(), below), _error_factor(answer)]
        if deep
        else [],
        "source": f"the {percent}% quantile of a log-normal error",
    }


def _error_factor(answer: dict[str, Any]) -> dict[str, Any]:
    """What the bounds lie apart from the prediction, as a factor."""
    high, step = answer["step_time_high_s"], answer["step_time_s"]
    value = None if high is None or not step else high / step
    source = (
        "spread of the calibration's residuals, of published runs without one; wider where "
        "it extrapolates"
    )
    return {
        "name": "error_factor_80",
        "value": value,
        "unit": "",
        "formula": "given",
        "inputs": [],
        "source": source,
    }


def _tree(
    table: Table, name: str, stage: int | None, seen: set[str], depth: int | None
) -> dict[str, Any]:
    node = explain(table, name, stage=stage, depth=0).to_dict()
    node["value"] = finite(node["value"])
    if node["formula"] != "given" and name not in seen and depth != 0:
        seen.add(name)
        below = None if depth is None else depth - 1
        node["inputs"] = [
            _tree(table, each, stage, seen, below) for each in table.registry.terms[name].inputs
        ]
    return node


def number(value: Any) -> float | None:
    """A plain float; None for what is not finite, which JSON has no word for."""
    found = float(value)
    return found if math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Bytes are whole."""
    found = float(value)
    return round(found) if math.isfinite(found) else None


def finite(given: Any) -> Any:
    """The same with None in place of numbers that are not finite, at every depth."""
    if isinstance(given, dict):
        return {key: finite(value) for key, value in given.items()}
    if isinstance(given, list):
        return [finite(value) for value in given]
    return None if isinstance(given, float) and not math.isfinite(given) else given


def _by_stage(table: Table, name: str) -> Column:
    """`(S, n)`, or `(1, n)` for what is the same on every stage."""
    column = table.column(name)
    return column if column.ndim == 2 else column[None, :]


def _clipped(table: Table, name: str, stage: Column) -> Column:
    return np.asarray(np.minimum(stage, _by_stage(table, name).shape[0] - 1))
