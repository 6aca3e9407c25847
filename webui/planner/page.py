"""Views of the planner page: form, plan table and the selected plan."""

from __future__ import annotations

import json
from typing import Any, Final

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.planner.store import selectors
from webui.planner import form_fields, phrases, result_layout
from webui.planner.charts import memory
from webui.planner.form import MAX_PLANS, FormState, map_problems, parse_form
from webui.planner.form_fields import OWN, PlannerField
from webui.planner.headline import describe_result
from webui.planner.pipeline_view import more_terms, pipeline_chart
from webui.planner.plan_link import plan_key
from webui.planner.queries import PlannerClient, planner_client
from webui.views.access import PageRequest, page

_MAX_FILE_BYTES: Final = 4 * 2**20
# training has no KV cache
MEMORY_LEGEND: Final = tuple(
    category for category in memory.CATEGORIES if not category[0].startswith("kv")
)


@page
@require_GET
def planner(request: PageRequest) -> HttpResponse:
    """The full page; it also works without scripts."""
    state = parse_form(request.GET)
    context = {
        **result_context(planner_client(state, request.user)),
        **form(state, request.user),
        "tab": "planner",
    }
    return render(request, "webui/planner/page.html", context)


@page
@require_GET
def answer(request: PageRequest) -> HttpResponse:
    """Headline and result for script updates; `quick` while a slider is dragged."""
    state = parse_form(request.GET)
    return render(
        request,
        "webui/planner/answer.html",
        result_context(planner_client(state, request.user, quick="quick" in request.GET)),
    )


@page
@require_POST
def shape(request: PageRequest) -> HttpResponse:
    """Puts an uploaded config.json into the link and redirects to the page."""
    file = request.FILES.get("file")
    text = ""
    if file is not None and file.size is not None and file.size <= _MAX_FILE_BYTES:
        text = file.read().decode("utf-8", errors="replace").strip()
    try:  # without spaces, the link is a third shorter
        text = json.dumps(json.loads(text), separators=(",", ":"))
    except (ValueError, RecursionError):
        text = text[:2000]
    state = parse_form(QueryDict(request.POST.get("query", "")))
    return redirect(f"{reverse('planner')}?{state.query(model=OWN, shape=text)}")


def result_context(planner: PlannerClient) -> dict[str, Any]:
    """Returns the template context of headline and result."""
    state = planner.state
    base: dict[str, Any] = {
        "form_state": state,
        "memory_categories": [(name, _(label), hue) for name, label, hue in MEMORY_LEGEND],
        "query": state.query(),
        "tokens": None,
        "calibration": planner.calibration_name,
    }
    if state.problems:
        return {
            **base,
            "problems": state.problems,
            "headline": "",
            "rest": _problem_summary(state.problems),
        }
    result = planner.search()
    if result.get("problems"):  # also if no plan is legal
        problems = map_problems(result["problems"])
        return {**base, "problems": problems, "headline": "", "rest": _problem_summary(problems)}
    tokens = state.line()["workload"].get("tokens")
    plans = result["plans"]
    wanted, notes = _selected(planner, plans, result.get("closest"))
    table = planner.table(wanted["plan"]) if wanted else None
    key = plan_key(wanted["plan"]) if wanted else ""
    best = bool(key) and bool(plans) and key == plan_key(plans[0]["plan"])
    headline, rest = describe_result(
        result, wanted, best=best, tokens=tokens, objective=state.objective
    )
    shown = result_layout.distinct(plans[: 3 * state.top], state.top)
    rows = [
        result_layout.row(rank, each, alike, state, key)
        for rank, (each, alike) in enumerate(shown, 1)
    ]
    return {
        **base,
        "tokens": tokens,
        "problems": [],
        "search_result": result,
        "headline": headline,
        "rest": rest,
        "notes": notes,
        "rows": rows,
        "unlisted": [each for each in state.compare if each not in {row["key"] for row in rows}],
        "more": state.query(top=min(MAX_PLANS, state.top * 4)) if _has_more(result, state) else "",
        "scatter": result_layout.drawn(plans, result.get("pareto", []), key),
        "plan": result_layout.chosen(wanted, state, tokens, more_terms(table)) if wanted else None,
        "pipeline": pipeline_chart(table, wanted["plan"]) if wanted and table is not None else None,
        "advice": [_advice(state, each) for each in result.get("advice", [])],
        "rejected": sorted(result.get("rejected", {}).items(), key=lambda item: -item[1]),
        "comparison": _comparison(planner, plans, tokens),
        "query": state.query(plan=state.plan),
    }


def form(state: FormState, user: Any) -> dict[str, Any]:
    """Returns the template context of the form: fields, values and errors."""
    own = [
        (name, _("%(name)s (mine)") % {"name": name}) for name in selectors.own_devices(user=user)
    ]

    def items(fields: tuple[PlannerField, ...]) -> list[dict[str, Any]]:
        return [_item(field, state, own) for field in fields]

    axes = items(form_fields.AXES)
    return {
        "model_fields": items(form_fields.MODEL),
        "cluster_fields": items(form_fields.CLUSTER),
        "own_device_fields": items(form_fields.OWN_DEVICE),
        "link_fields": items(form_fields.LINKS),
        "batch_fields": items(form_fields.BATCH),
        "trained_fields": items(form_fields.TRAINED),
        "how_fields": items(form_fields.HOW),
        "axis_fields": axes,
        "own_model": state.values["model"] == OWN,
        "own_device": state.values["device"] == OWN,
        "axes_open": any(item["value"] != item["field"].default for item in axes),
        "links_open": any(state.values[field.name] for field in form_fields.LINKS),
    }


def _item(field: PlannerField, state: FormState, own: list[tuple[str, str]]) -> dict[str, Any]:
    value = state.values[field.name]
    choices = list(field.choices)
    if field.name == "device":
        choices = [*own, *choices]
    if field.kind == "choice" and value not in dict(choices):
        choices.append((value, value))
    at = 0
    if field.slide:
        number = int(value) if value.isdecimal() and len(value) < 15 else 0
        at = min(range(len(field.slide)), key=lambda index: abs(field.slide[index] - number))
    return {
        "field": field,
        "value": value,
        "choices": choices,
        "at": at,
        "stops": ",".join(map(str, field.slide)),
        "last": len(field.slide) - 1,
        "errors": [item for item in state.problems if item["field"] == field.name],
    }


def _selected(
    planner: PlannerClient, plans: list[dict[str, Any]], closest: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns the selected plan with notes: the link's plan, else the best, else the closest."""
    state = planner.state
    best = plans[0] if plans else closest
    named = state.plan_dict(state.plan) if state.plan else None
    if named is None:
        return best, []
    listed = next((each for each in plans if plan_key(each["plan"]) == state.plan), None)
    if listed is not None:
        return listed, []
    answer = planner.estimate(named)
    if answer.get("ok"):
        return answer, [] if answer.get("fits") or not plans else [
            _("The selected plan does not fit. All plans in the table fit.")
        ]
    reason = phrases.listed_problems(map_problems(answer["problems"]))
    return best, [
        _("The previously selected plan %(plan)s is not valid here: %(reason)s")
        % {"plan": phrases.glyph(named), "reason": reason}
    ]


def _comparison(
    planner: PlannerClient, plans: list[dict[str, Any]], tokens: float | None
) -> dict[str, Any] | None:
    """Compares two plans if the link names two valid plans."""
    known = {plan_key(each["plan"]): each for each in plans}
    answers = []
    for key in planner.state.compare:
        named = planner.state.plan_dict(key)
        answer = known.get(key) or (planner.estimate(named) if named else {})
        if answer.get("memory"):
            answers.append(answer)
    if len(answers) != 2:
        return None
    first, second = answers
    return {
        "first": first["plan"],
        "second": second["plan"],
        "rows": result_layout.compared(first, second, tokens),
        "clear": planner.state.query(compare=()),
    }


def _advice(state: FormState, each: Any) -> dict[str, Any]:
    """Returns a change that makes the model fit: its text and the link that applies it."""
    if isinstance(each, str):
        return {"text": each, "query": ""}
    changes = {
        name: "" if value is None else str(value)
        for name, value in (each.get("changes") or {}).items()
        if name in form_fields.FIELDS
    }
    return {
        "text": str(each.get("message", "")),
        "query": state.query(**changes, plan="") if changes else "",
    }


def _has_more(result: dict[str, Any], state: FormState) -> bool:
    return int(result.get("fit") or 0) > state.top and state.top < MAX_PLANS


def _problem_summary(problems: list[dict[str, str]]) -> str:
    message, field = problems[0]["message"], form_fields.FIELDS.get(problems[0]["field"])
    more, count = "", len(problems) - 1
    if count:
        more = " " + ngettext("%(count)s more problem.", "%(count)s more problems.", count) % {
            "count": count
        }
    label = f"{_(field.label)}: " if field and message[:1] in "-+.0123456789'" else ""
    message = message if label else f"{message[:1].upper()}{message[1:]}"
    return f"{label}{message.rstrip('.')}.{more}"
