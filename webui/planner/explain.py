"""The tree under one number of one plan: its formula, what goes in, where it is from. One level of
it at a time.

Knows the planner's registry of terms; computes nothing itself.
"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from orchestrator.common.errors import Refusal
from orchestrator.planner.model.terms import TERMS, Table, explain
from webui.planner import phrases
from webui.planner.form import question
from webui.planner.queries import Asker, asker
from webui.presentation import formatting
from webui.views.access import PageRequest, page

_DEPTH: Final = 1  # levels sent at once; what lies deeper is asked for when it is opened
_BOUNDS: Final = {"step_time_low_s": 10, "step_time_high_s": 90}


@page
@require_GET
def why(request: PageRequest) -> HttpResponse:
    """A part for the dialog, or the whole page where it is opened as one."""
    asked = question(request.GET)
    name = request.GET.get("why", "step_time_s")
    node = told(asker(asked, request.user), name)
    part = bool(request.headers.get("X-Part"))
    inner = part and request.headers.get("X-Part") == "inner"
    context = {
        "node": node,
        "query": asked.query(),
        "part": part,
        "inner": inner,
        "tab": "planner",
        "title": phrases.term_words(name),
        "back": asked.query(),
        "headline": "",
        "rest": "What this number is made of.",
        "plan_shown": asked.plan_dict(asked.plan),
    }
    return render(
        request, "webui/planner/why_part.html" if part else "webui/planner/why.html", context
    )


def told(asker: Asker, name: str) -> dict[str, Any]:
    """The node with its inputs, values in words.

    Raises Refusal 404 for no such number, 422 without a legal plan.
    """
    asked = asker.question
    plan = asked.plan_dict(asked.plan) if asked.plan else None
    if asked.problems or plan is None:
        detail = (
            phrases.listed_problems(asked.problems)
            if asked.problems
            else "the link names no plan; choose one."
        )
        raise Refusal("plan-invalid", "There is no number to explain", 422, detail)
    table = asker.table(plan)
    if table is None:
        raise Refusal(
            "plan-invalid",
            "The plan is not legal here",
            422,
            "Choose a row of the planner's table.",
        )
    if name in _BOUNDS:
        return _bound(asker, plan, table, name)
    if name not in TERMS.terms and name not in TERMS.inputs:
        raise Refusal(
            "not-found",
            "There is no such number",
            404,
            f"{name[:60]!r} is not a term of the planner.",
        )
    return _node(explain(table, name, stage=_stage(table), depth=_DEPTH).to_dict(), table)


def _node(tree: dict[str, Any], table: Table) -> dict[str, Any]:
    name = tree["name"]
    known = TERMS.terms.get(name)
    inputs = [_node(each, table) for each in tree["inputs"]]
    return {
        "name": name,
        "word": phrases.term_words(name),
        "value": phrases.shown(name, tree["value"], tree["unit"]),
        "exact": exact(tree["value"], tree["unit"]),
        "formula": tree["formula"],
        "source": tree["source"],
        "inputs": inputs,
        "deeper": known is not None and bool(known.inputs) and not inputs,
        "given": known is None,
    }


def _bound(asker: Asker, plan: dict[str, Any], table: Table, name: str) -> dict[str, Any]:
    answer = asker.estimate(plan)
    percent = _BOUNDS[name]
    step = _node(explain(table, "step_time_s", depth=0).to_dict(), table)
    return {
        "name": name,
        "word": phrases.term_words(name),
        "value": phrases.in_unit(answer[name], "s"),
        "exact": exact(answer[name], "s"),
        "source": "spread of measured runs around the prediction",
        "formula": f"the {percent}% quantile of the relative error on step_time_s",
        "inputs": [step],
        "deeper": False,
        "given": False,
    }


def _stage(table: Table) -> int:
    return int(table.column("worst_stage").reshape(-1)[0])


def exact(value: Any, unit: str) -> str:
    """The number with all its digits, for a tooltip."""
    if isinstance(value, list):
        return ", ".join(exact(each, "") for each in value[:16]) + (f" {unit}" if unit else "")
    real = formatting.number(value)
    if real is None:
        return ""
    digits = f"{real:,.0f}" if real == int(real) and abs(real) < 1e18 else f"{real:.8g}"
    return f"{digits} {unit}".strip()
