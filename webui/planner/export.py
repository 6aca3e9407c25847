"""Export of a plan as the configuration of another engine."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET

from orchestrator.common.errors import Refusal
from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from webui.planner import phrases
from webui.planner.form import map_problems, parse_form
from webui.views.access import PageRequest, page

ENGINES: Final = ("torchtitan", "megatron", "deepspeed", "accelerate")


@page
@require_GET
def export(request: PageRequest) -> HttpResponse:
    """A fragment for the dialog, the full page, or the file (`download=1`)."""
    state, engine = parse_form(request.GET), request.GET.get("to", "")
    config = export_for(request.user, state, engine)
    if request.GET.get("download"):
        name = content_disposition_header(True, config["filename"]) or "attachment"
        return HttpResponse(
            config["text"],
            content_type="text/plain; charset=utf-8",
            headers={"Content-Disposition": name},
        )
    context: dict[str, Any] = {
        "config": config,
        "query": state.query(),
        "engine": engine,
        "tab": "planner",
        "headline": "",
        "back": state.query(),
        "rest": _("Configuration of the selected plan for %(engine)s.") % {"engine": engine},
        "plan_shown": state.plan_dict(state.plan),
    }
    template = "export_part.html" if request.headers.get("X-Part") else "export.html"
    return render(request, f"webui/planner/{template}", context)


def export_for(user: Any, state: Any, engine: str) -> dict[str, Any]:
    """Returns `{engine, filename, text, notes}`.

    Raises Refusal 422 if the engine cannot run the plan and 404 for an unknown engine.
    """
    if engine not in ENGINES:
        raise Refusal(
            "not-found",
            _("Unknown engine"),
            404,
            _("%(engine)r is not one of %(engines)s.")
            % {"engine": engine[:40], "engines": ", ".join(ENGINES)},
        )
    plan = state.plan_dict(state.plan) if state.plan else None
    if state.problems or plan is None:
        detail = (
            phrases.listed_problems(state.problems)
            if state.problems
            else _("The link names no plan. Select one in the table.")
        )
        raise Refusal("plan-invalid", _("No plan to export"), 422, detail)
    try:
        return user_api.export(user=user, line=state.line(plan), engine=engine)
    except BadRequest as refused:
        problems = map_problems([item.model_dump(by_alias=True) for item in refused.problems])
        raise Refusal(
            "plan-invalid",
            _("%(engine)s cannot run this plan") % {"engine": engine},
            422,
            phrases.listed_problems(problems),
        ) from None
