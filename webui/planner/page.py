"""The planner's page: which plan to run, whether it fits, how fast it is and what it costs.

Decides nothing itself.
"""

from __future__ import annotations

import json
from typing import Any, Final

from django.http import HttpResponse, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from orchestrator.planner.store import selectors
from webui.planner import form_fields, phrases, result_layout
from webui.planner.charts import memory
from webui.planner.form import MOST, Question, placed, question
from webui.planner.form_fields import OWN, PlannerField
from webui.planner.pipeline_view import more_terms, pipeline_of
from webui.planner.plan_link import key_of
from webui.planner.queries import Asker, asker
from webui.views.access import PageRequest, page

_MOST_FILE: Final = 4 * 2**20
# the categories of training; a KV cache is serving's
MEMORY_LEGEND: Final = tuple(each for each in memory.CATEGORIES if not each[0].startswith("kv"))


@page
@require_GET
def planner(request: PageRequest) -> HttpResponse:
    """The whole page, answered: it says the same without scripts."""
    asked = question(request.GET)
    context = {
        **answered(asker(asked, request.user)),
        **form(asked, request.user),
        "tab": "planner",
    }
    return render(request, "webui/planner/page.html", context)


@page
@require_GET
def answer(request: PageRequest) -> HttpResponse:
    """Headline and answer alone, for a page whose sliders move; `quick` while one is held."""
    asked = question(request.GET)
    return render(
        request,
        "webui/planner/answer.html",
        answered(asker(asked, request.user, quick="quick" in request.GET)),
    )


@page
@require_POST
def shape(request: PageRequest) -> HttpResponse:
    """A config.json from a file: back to the page with it in the link."""
    given = request.FILES.get("file")
    text = ""
    if given is not None and given.size is not None and given.size <= _MOST_FILE:
        text = given.read().decode("utf-8", errors="replace").strip()
    try:  # without its spaces it is a third shorter, and so is the link
        text = json.dumps(json.loads(text), separators=(",", ":"))
    except (ValueError, RecursionError):
        text = text[:2000]
    asked = question(QueryDict(request.POST.get("query", "")))
    return redirect(f"{reverse('planner')}?{asked.query(model=OWN, shape=text)}")


def answered(asker: Asker) -> dict[str, Any]:
    """The template's words for headline and answer."""
    asked = asker.question
    base: dict[str, Any] = {
        "asked": asked,
        "memory_categories": MEMORY_LEGEND,
        "query": asked.query(),
        "tokens": None,
        "calibration": asker.calibration_name,
    }
    if asked.problems:
        return {
            **base,
            "problems": asked.problems,
            "headline": "",
            "rest": _unanswered(asked.problems),
        }
    found = asker.search()
    if found.get("problems"):  # also where no plan is legal
        problems = placed(found["problems"])
        return {**base, "problems": problems, "headline": "", "rest": _unanswered(problems)}
    tokens = asked.line()["workload"].get("tokens")
    plans = found["plans"]
    wanted, notes = _wanted(asker, plans, found.get("closest"))
    table = asker.table(wanted["plan"]) if wanted else None
    best = wanted is not None and bool(plans) and key_of(wanted["plan"]) == key_of(plans[0]["plan"])
    headline, rest = phrases.headline(
        found, wanted, best=best, tokens=tokens, objective=asked.objective
    )
    key = key_of(wanted["plan"]) if wanted else ""
    shown = result_layout.distinct(plans[: 3 * asked.top], asked.top)
    rows = [
        result_layout.row(rank, each, alike, asked, key)
        for rank, (each, alike) in enumerate(shown, 1)
    ]
    return {
        **base,
        "tokens": tokens,
        "problems": [],
        "found": found,
        "headline": headline,
        "rest": rest,
        "notes": notes,
        "rows": rows,
        "unlisted": [each for each in asked.compare if each not in {row["key"] for row in rows}],
        "more": asked.query(top=min(MOST, asked.top * 4)) if _has_more(found, asked) else "",
        "scatter": result_layout.drawn(plans, found.get("pareto", []), key),
        "plan": result_layout.chosen(wanted, asked, tokens, more_terms(table)) if wanted else None,
        "pipeline": pipeline_of(table, wanted["plan"]) if wanted and table is not None else None,
        "advice": [_advice(asked, each) for each in found.get("advice", [])],
        "rejected": sorted(found.get("rejected", {}).items(), key=lambda item: -item[1]),
        "comparison": _comparison(asker, plans, tokens),
        "query": asked.query(plan=asked.plan),
    }


def form(asked: Question, user: Any) -> dict[str, Any]:
    """The fields with their values and what is wrong beside them."""
    own = [(name, f"{name} · mine") for name in selectors.own_devices(user=user)]

    def items(fields: tuple[PlannerField, ...]) -> list[dict[str, Any]]:
        return [_item(field, asked, own) for field in fields]

    axes = items(form_fields.AXES)
    return {
        "model_fields": items(form_fields.MODEL),
        "cluster_fields": items(form_fields.CLUSTER),
        "own_device_fields": items(form_fields.OWN_DEVICE),
        "link_fields": items(form_fields.LINKS),
        "batch_fields": items(form_fields.BATCH),
        "how_fields": items(form_fields.HOW),
        "axis_fields": axes,
        "own_model": asked.values["model"] == OWN,
        "own_device": asked.values["device"] == OWN,
        "axes_open": any(item["value"] != item["field"].default for item in axes),
        "links_open": any(asked.values[field.name] for field in form_fields.LINKS),
    }


def _item(field: PlannerField, asked: Question, own: list[tuple[str, str]]) -> dict[str, Any]:
    value = asked.values[field.name]
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
        "errors": [item for item in asked.problems if item["field"] == field.name],
    }


def _wanted(
    asker: Asker, plans: list[dict[str, Any]], closest: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """The plan that the link names, else the best one, else the closest to fitting; and what is to
    be said about it.
    """
    asked = asker.question
    best = plans[0] if plans else closest
    named = asked.plan_dict(asked.plan) if asked.plan else None
    if named is None:
        return best, []
    listed = next((each for each in plans if key_of(each["plan"]) == asked.plan), None)
    if listed is not None:
        return listed, []
    found = asker.estimate(named)
    if found.get("ok"):
        return found, [] if found.get("fits") or not plans else [
            "The chosen plan does not fit; those of the table do."
        ]
    why = phrases.listed_problems(placed(found["problems"]))
    return best, [f"The plan chosen before, {phrases.glyph(named)}, is not legal here: {why}"]


def _comparison(
    asker: Asker, plans: list[dict[str, Any]], tokens: float | None
) -> dict[str, Any] | None:
    """Two plans beside each other, where the link names two that are legal."""
    known = {key_of(each["plan"]): each for each in plans}
    answers = []
    for key in asker.question.compare:
        named = asker.question.plan_dict(key)
        found = known.get(key) or (asker.estimate(named) if named else {})
        if found.get("memory"):
            answers.append(found)
    if len(answers) != 2:
        return None
    first, second = answers
    return {
        "first": first["plan"],
        "second": second["plan"],
        "rows": result_layout.compared(first, second, tokens),
        "clear": asker.question.query(compare=()),
    }


def _advice(asked: Question, each: Any) -> dict[str, Any]:
    """A change that would make it fit, as a sentence and as a link that makes it."""
    if isinstance(each, str):
        return {"says": each, "query": ""}
    told = (each.get("changes") or {}).items()
    changes = {
        name: "" if value is None else str(value)
        for name, value in told
        if name in form_fields.FIELDS
    }
    return {
        "says": str(each.get("says", "")),
        "query": asked.query(**changes, plan="") if changes else "",
    }


def _has_more(found: dict[str, Any], asked: Question) -> bool:
    return int(found.get("fit") or 0) > asked.top and asked.top < MOST


def _unanswered(problems: list[dict[str, str]]) -> str:
    says, about = problems[0]["says"], form_fields.FIELDS.get(problems[0]["field"])
    more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
    where = f"{about.label}: " if about and says[:1] in "-+.0123456789'" else ""
    says = says if where else f"{says[:1].upper()}{says[1:]}"
    return f"{where}{says.rstrip('.')}.{more}"
