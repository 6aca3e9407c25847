"""Explain trees: the formula, inputs and source of each number of an answer.

Does not compute terms itself.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.planner.model.all_terms import TERMS
from orchestrator.planner.model.communication.collective_bytes import KINDS
from orchestrator.planner.model.terms import Table, explain
from orchestrator.planner.plan_request import BadRequest
from workers.contracts.base import problem

MEMORY = (
    "params_bytes",
    "reference_bytes",
    "grads_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "logits_bytes",
    "buffers_bytes",
    "rollout_bytes",
    "unattributed_bytes",
)
TIME = ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "rollout_s", "other_s")
RATES = (
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu",
    "hfu",
    "bubble_fraction",
    "generation_share",
)
COMM = ("dp_bytes", "tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes")
COLLECTIVES = tuple(f"{kind}_bytes" for kind in KINDS)
HOST = ("host_bytes", "host_capacity_bytes")
COST = ("usd_per_billion_tokens", "kwh_per_billion_tokens", "days")
_BOUNDS = {"step_time_low_s": ("/", 10), "step_time_high_s": ("x", 90)}
_MAX_NAMES = 24
# 0 in runs that sample no answers: their trees, a tenth of all, end with the number of prompts
_SAMPLING = ("rollout_bytes", "rollout_s", "sampler_bytes")


@dataclass(frozen=True)
class ExplainOptions:
    """What to explain: all numbers in place (no `names`), or named ones under `explained`.

    `depth` limits the levels of a tree; None: down to the inputs.
    """

    names: tuple[str, ...] = ()
    depth: int | None = None


def parse_explain_options(explain: Any, depth: Any = None) -> ExplainOptions | None:
    """From `explain` (true, a number's name, or several names) and `explain_depth`.

    Raises BadRequest.
    """
    if depth is not None and (type(depth) is not int or not 0 <= depth <= 100):
        message = f"{str(depth)[:40]} is not a number of levels from 0 to 100"
        raise BadRequest([problem("explain_depth", message, "Use a number such as 1.")])
    if explain is None or isinstance(explain, bool):
        return ExplainOptions((), depth) if explain else None
    names = [explain] if isinstance(explain, str) else explain
    if not isinstance(names, Sequence) or not 1 <= len(names) <= _MAX_NAMES:
        message = f"explain is true, the name of a number, or 1 to {_MAX_NAMES} names"
        raise BadRequest([problem("explain", message, 'Use "step_time_s".')])
    for name in names:
        if not isinstance(name, str) or not _is_explainable(name):
            near = difflib.get_close_matches(str(name), TERMS.terms, n=3, cutoff=0.5)
            hint = f"Use {' or '.join(near or ['step_time_s', 'total_bytes'])}."
            message = f"{str(name)[:60]!r} is not a number of the planner"
            raise BadRequest([problem("explain", message, hint)])
    return ExplainOptions(tuple(dict.fromkeys(names)), depth)


def explain_answer(
    table: Table, row: int, answer: dict[str, Any], depth: int | None = None
) -> dict[str, Any]:
    """The answer with a tree `{name, value, unit, formula, inputs, source}` for each number.

    Each tree reaches down to the inputs, or `depth` levels; a repeated term shows its inputs once.
    """
    single = table.row(row)
    stage = answer["memory"]["stage"]

    def tree(name: str, stage: int | None = None) -> dict[str, Any]:
        return _term_tree(single, name, stage, set(), depth)

    def trees(names: Sequence[str], values: dict[str, Any] = answer) -> dict[str, Any]:
        return {name: tree(name) if values[name] is not None else None for name in names}

    memory = {name: tree(name, stage) for name in (*MEMORY, "total_bytes", "capacity_bytes")}
    memory |= {"stage": tree("worst_stage"), "per_stage_total_bytes": tree("stage_total_bytes")}
    collectives = answer["collectives"]
    return {
        **answer,
        "memory": memory,
        "step_time_s": tree("step_time_s"),
        **{name: _bound_tree(single, name, answer, depth) for name in _BOUNDS},
        "time": trees(TIME, answer["time"]),
        **trees(RATES),
        "host": trees(HOST, answer["host"]),
        "comm": trees(COMM, answer["comm"]),
        **trees(COST),
        "collectives": collectives and trees(COLLECTIVES, collectives),
    }


def explain_terms(
    table: Table, row: int, answer: dict[str, Any], options: ExplainOptions
) -> dict[str, Any]:
    """The trees of the named terms only: `{name: tree}`."""
    single, stage = table.row(row), answer["memory"]["stage"]
    return {
        name: _bound_tree(single, name, answer, options.depth)
        if name in _BOUNDS
        else _term_tree(single, name, stage, set(), options.depth)
        for name in options.names
    }


def _is_explainable(name: str) -> bool:
    return name in TERMS.terms or name in TERMS.inputs or name in _BOUNDS


def _bound_tree(
    table: Table, name: str, answer: dict[str, Any], depth: int | None
) -> dict[str, Any]:
    sign, percent = _BOUNDS[name]
    inputs = []
    if depth is None or depth > 0:
        below = None if depth is None else depth - 1
        inputs = [_term_tree(table, "step_time_s", None, set(), below), _error_factor(answer)]
    return {
        "name": name,
        "value": answer[name],
        "unit": "s",
        "formula": f"step_time_s {sign} error_factor_80",
        "inputs": inputs,
        "source": f"the {percent}% quantile of a log-normal error",
    }


def _error_factor(answer: dict[str, Any]) -> dict[str, Any]:
    """The factor between a bound and the prediction."""
    high, step = answer["step_time_high_s"], answer["step_time_s"]
    return {
        "name": "error_factor_80",
        "value": None if high is None or not step else high / step,
        "unit": "",
        "formula": "given",
        "inputs": [],
        "source": (
            "spread of the calibration's residuals, of published runs without one; wider where "
            "it extrapolates"
        ),
    }


def _term_tree(
    table: Table, name: str, stage: int | None, seen: set[str], depth: int | None
) -> dict[str, Any]:
    node = explain(table, name, stage=stage, depth=0).to_dict()
    node["value"] = _finite_or_none(node["value"])
    if node["formula"] != "given" and name not in seen and depth != 0:
        seen.add(name)
        below = None if depth is None else depth - 1
        samples = name not in _SAMPLING or table["rollout_prompts"].any()
        inputs = table.registry.terms[name].inputs if samples else ("rollout_prompts",)
        node["inputs"] = [_term_tree(table, input_, stage, seen, below) for input_ in inputs]
    return node


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
