"""The form that forks a run at a kept step: a few fields and a merge patch over its spec.

Decides nothing itself.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs import selectors, services
from webui.views.access import PageRequest, field_errors, page

FIELDS = ("name", "steps", "lr", "plan", "changes")


@page
@require_http_methods(["GET", "POST"])
def fork(request: PageRequest, id: int) -> HttpResponse:
    """GET shows the form for `?step=`, the newest kept by default; POST forks, or shows what is
    wrong with it.
    """
    run = selectors.run_get(user=request.user, id=id)
    kept = list(dict.fromkeys(selectors.checkpoints_of(run=run).values_list("step", flat=True)))
    if request.method == "GET":
        wanted = request.GET.get("step", "")
        step = int(wanted) if wanted.isdecimal() and int(wanted) in kept else next(iter(kept), None)
        return render(request, "webui/fork.html", _context(run, kept, step, _start(run)))
    shown = {name: request.POST.get(name, "") for name in FIELDS}
    step_text = request.POST.get("step", "")
    step = int(step_text) if step_text.isdecimal() else -1
    try:
        made = services.run_fork(
            run=run,
            by=request.user,
            step=step,
            changes=changes_of(shown, _start(run), run.spec.get("plan")),
            name=shown["name"].strip() or None,
            force=bool(request.POST.get("force")),
        )
    except Refusal as refusal:
        context = _context(run, kept, step, shown, refusal=refusal)
        return render(request, "webui/fork.html", context, status=refusal.status)
    messages.success(
        request, f"This is run {made.pk}; it goes on from step {step:,} of run {run.pk}."
    )
    return redirect("run", made.pk)


def changes_of(shown: dict[str, str], start: dict[str, str], plan: Any = None) -> dict[str, Any]:
    """The merge patch that the form asks for: its text, and over it the fields that were changed.
    The plan in its field
    is a whole one: what it leaves out of the parent's `plan` goes back to its default.

    Raises Refusal 422 about the field that cannot be read.
    """
    changes = _object("changes", shown["changes"])
    if shown["steps"].strip() != start["steps"]:
        changes.setdefault("train", {})["steps"] = _number("steps", shown["steps"], int)
    if shown["lr"].strip() != start["lr"]:
        changes.setdefault("train", {}).setdefault("optimizer", {})["lr"] = _number(
            "lr", shown["lr"], float
        )
    if shown["plan"].strip() and shown["plan"].strip() != start["plan"]:
        text = shown["plan"].strip()
        before = plan if isinstance(plan, dict) else {}
        changes["plan"] = (
            "auto"
            if text.strip('"') == "auto"
            else {**dict.fromkeys(before), **_object("plan", text)}
        )
    return changes


def _start(run: Any) -> dict[str, str]:
    """The fields as the parent has them."""
    train, plan = run.spec.get("train") or {}, run.spec.get("plan")
    lr = (train.get("optimizer") or {}).get("lr")
    return {
        "name": "",
        "steps": str(train.get("steps", "")),
        "lr": "" if lr is None else f"{lr:g}",
        "plan": json.dumps(plan) if plan else "",
        "changes": "",
    }


def _context(
    run: Any,
    kept: list[int],
    step: int | None,
    shown: dict[str, str],
    refusal: Refusal | None = None,
) -> dict[str, Any]:
    errors = field_errors(refusal) if refusal else {}
    places = {"steps": "train.steps", "lr": "train.optimizer.lr"}
    named = {
        name: errors.get(name, []) + errors.get(places.get(name, "-"), [])
        for name in (*FIELDS, "step")
    }
    told = {id(item) for some in named.values() for item in some}
    others = [item for some in errors.values() for item in some if id(item) not in told]
    return {
        "run": run,
        "kept": kept,
        "step": step,
        "shown": shown,
        "refusal": refusal,
        "errors": named,
        "others": others,
        "misfits": refusal is not None and refusal.type == "plan-does-not-fit",
    }


def _object(field: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(
            field, f"the JSON cannot be read: {error}", '{"train": {"clip_norm": 1.0}}'
        ) from None
    if not isinstance(found, dict):
        raise invalid(field, "it is not an object in braces", '{"train": {"clip_norm": 1.0}}')
    return found


def _number(field: str, text: str, kind: Any) -> Any:
    try:
        return kind(text.strip())
    except ValueError:
        raise invalid(
            field, f"{text.strip()!r} is not a number", "400" if kind is int else "0.001"
        ) from None
