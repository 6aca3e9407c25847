"""Explanation of one number of a plan: formula, source and inputs, one level per request."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from orchestrator.common.errors import Refusal
from orchestrator.planner.model.terms import TERMS, Table, explain
from webui.planner import phrases
from webui.planner.form import parse_form
from webui.planner.queries import PlannerClient, planner_client
from webui.presentation import formatting
from webui.views.access import PageRequest, page

_DEPTH: Final = 1  # levels per response; deeper levels are loaded when opened
_BOUNDS: Final = {"step_time_low_s": 10, "step_time_high_s": 90}


@page
@require_GET
def why(request: PageRequest) -> HttpResponse:
    """A fragment for the dialog, or the full page."""
    state = parse_form(request.GET)
    name = request.GET.get("why", "step_time_s")
    node = explain_term(planner_client(state, request.user), name)
    part = bool(request.headers.get("X-Part"))
    inner = part and request.headers.get("X-Part") == "inner"
    context = {
        "node": node,
        "query": state.query(),
        "part": part,
        "inner": inner,
        "tab": "planner",
        "title": _capitalized(phrases.term_label(name)),
        "back": state.query(),
        "headline": "",
        "rest": _("How this number is computed."),
        "plan_shown": state.plan_dict(state.plan),
    }
    return render(
        request, "webui/planner/why_part.html" if part else "webui/planner/why.html", context
    )


def explain_term(planner: PlannerClient, name: str) -> dict[str, Any]:
    """Returns the node of a term with its inputs.

    Raises Refusal 404 for an unknown term and 422 without a valid plan.
    """
    state = planner.state
    plan = state.plan_dict(state.plan) if state.plan else None
    if state.problems or plan is None:
        detail = (
            phrases.listed_problems(state.problems)
            if state.problems
            else _("The link names no plan. Select one in the table.")
        )
        raise Refusal("plan-invalid", _("No plan to explain"), 422, detail)
    table = planner.table(plan)
    if table is None:
        raise Refusal(
            "plan-invalid",
            _("The plan is not valid"),
            422,
            _("Select a row of the planner's table."),
        )
    if name in _BOUNDS:
        return _bound(planner, plan, table, name)
    if name not in TERMS.terms and name not in TERMS.inputs:
        raise Refusal(
            "not-found",
            _("Unknown term"),
            404,
            _("%(name)r is not a term of the planner.") % {"name": name[:60]},
        )
    return _node(explain(table, name, stage=_stage(table), depth=_DEPTH).to_dict(), table)


def _node(tree: dict[str, Any], table: Table) -> dict[str, Any]:
    name = tree["name"]
    known = TERMS.terms.get(name)
    inputs = [_node(each, table) for each in tree["inputs"]]
    return {
        "name": name,
        "label": phrases.term_label(name),
        "value": phrases.shown(name, tree["value"], tree["unit"]),
        "exact": exact(tree["value"], tree["unit"]),
        "formula": tree["formula"],
        "source": tree["source"],
        "inputs": inputs,
        "has_inputs": known is not None and bool(known.inputs) and not inputs,
    }


def _bound(planner: PlannerClient, plan: dict[str, Any], table: Table, name: str) -> dict[str, Any]:
    answer = planner.estimate(plan)
    percent = _BOUNDS[name]
    step = _node(explain(table, "step_time_s", depth=0).to_dict(), table)
    return {
        "name": name,
        "label": phrases.term_label(name),
        "value": phrases.in_unit(answer[name], "s"),
        "exact": exact(answer[name], "s"),
        "source": _("spread of measured runs around the prediction"),
        "formula": _("%(percent)s%% quantile of the relative error on step_time_s")
        % {"percent": percent},
        "inputs": [step],
        "has_inputs": False,
    }


def _stage(table: Table) -> int:
    return int(table.column("worst_stage").reshape(-1)[0])


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def exact(value: Any, unit: str) -> str:
    """Returns the number with all digits, for a tooltip."""
    if isinstance(value, list):
        return ", ".join(exact(each, "") for each in value[:16]) + (f" {unit}" if unit else "")
    real = formatting.number(value)
    if real is None:
        return ""
    digits = f"{real:,.0f}" if real == int(real) and abs(real) < 1e18 else f"{real:.8g}"
    return f"{digits} {unit}".strip()
