"""A plan as another engine's configuration: shown to be copied, or downloaded."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.views.decorators.http import require_GET

from orchestrator.common.errors import Refusal
from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from webui.planner import phrases
from webui.planner.form import placed, question
from webui.views.access import PageRequest, page

ENGINES: Final = ("torchtitan", "megatron", "deepspeed", "accelerate")


@page
@require_GET
def export(request: PageRequest) -> HttpResponse:
    """A part for the dialog, the whole page, or (`download=1`) the file."""
    asked, engine = question(request.GET), request.GET.get("to", "")
    made = made_for(request.user, asked, engine)
    if request.GET.get("download"):
        name = content_disposition_header(True, made["filename"]) or "attachment"
        return HttpResponse(
            made["text"],
            content_type="text/plain; charset=utf-8",
            headers={"Content-Disposition": name},
        )
    context: dict[str, Any] = {
        "made": made,
        "query": asked.query(),
        "engine": engine,
        "tab": "planner",
        "headline": "",
        "back": asked.query(),
        "rest": f"The chosen plan as {engine} reads it.",
        "plan_shown": asked.plan_dict(asked.plan),
    }
    template = "export_part.html" if request.headers.get("X-Part") else "export.html"
    return render(request, f"webui/planner/{template}", context)


def made_for(user: Any, asked: Any, engine: str) -> dict[str, Any]:
    """`{engine, filename, text, notes}`; raises Refusal 422 for what the engine cannot run, 404 for
    no engine.
    """
    if engine not in ENGINES:
        raise Refusal(
            "not-found",
            "There is no such engine",
            404,
            f"{engine[:40]!r}; known are {', '.join(ENGINES)}.",
        )
    plan = asked.plan_dict(asked.plan) if asked.plan else None
    if asked.problems or plan is None:
        detail = (
            phrases.listed_problems(asked.problems)
            if asked.problems
            else "The link names no plan; choose one."
        )
        raise Refusal("plan-invalid", "There is no plan to export", 422, detail)
    try:
        return user_api.export(user=user, line=asked.line(plan), engine=engine)
    except BadRequest as refused:
        problems = placed([item.model_dump(by_alias=True) for item in refused.problems])
        raise Refusal(
            "plan-invalid",
            f"{engine} cannot run this",
            422,
            phrases.listed_problems(problems),
        ) from None
