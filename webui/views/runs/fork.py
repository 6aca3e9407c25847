"""Fork page: starts a new run from a checkpoint, with changed fields or a JSON merge patch."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs import selectors, services
from orchestrator.runs.store.resumable import resumable
from webui.views.access import PageRequest, field_errors, page

FIELDS = ("name", "steps", "lr", "plan", "changes")


@page
@require_http_methods(["GET", "POST"])
def fork(request: PageRequest, id: int) -> HttpResponse:
    """GET shows the form for `?step=` (default: the newest checkpoint); POST forks the run."""
    run = selectors.run_get(user=request.user, id=id)
    checkpoints = list(dict.fromkeys(resumable(run=run).values_list("step", flat=True)))
    if request.method == "GET":
        requested = request.GET.get("step", "")
        step = (
            int(requested)
            if requested.isdecimal() and int(requested) in checkpoints
            else next(iter(checkpoints), None)
        )
        return render(request, "webui/fork.html", _context(run, checkpoints, step, _defaults(run)))
    values = {name: request.POST.get(name, "") for name in FIELDS}
    step_text = request.POST.get("step", "")
    step = int(step_text) if step_text.isdecimal() else -1
    try:
        new = services.run_fork(
            run=run,
            by=request.user,
            step=step,
            changes=changes_of(values, _defaults(run), run.spec.get("plan")),
            name=values["name"].strip() or None,
            force=bool(request.POST.get("force")),
        )
    except Refusal as refusal:
        context = _context(run, checkpoints, step, values, refusal=refusal)
        return render(request, "webui/fork.html", context, status=refusal.status)
    messages.success(
        request,
        _("Run %(id)s continues from step %(step)s of run %(source)s.")
        % {"id": new.pk, "step": f"{step:,}", "source": run.pk},
    )
    return redirect("run", new.pk)


def changes_of(values: dict[str, str], start: dict[str, str], plan: Any = None) -> dict[str, Any]:
    """Return the form's merge patch: its JSON, overlaid with the changed fields.

    The plan field is complete: keys of the parent's `plan` that it omits return to their defaults.
    Raises Refusal 422 that names the invalid field.
    """
    changes = _object("changes", values["changes"])
    if values["steps"].strip() != start["steps"]:
        changes.setdefault("train", {})["steps"] = _number("steps", values["steps"], int)
    if values["lr"].strip() != start["lr"]:
        changes.setdefault("train", {}).setdefault("optimizer", {})["lr"] = _number(
            "lr", values["lr"], float
        )
    if values["plan"].strip() and values["plan"].strip() != start["plan"]:
        text = values["plan"].strip()
        before = plan if isinstance(plan, dict) else {}
        changes["plan"] = (
            "auto"
            if text.strip('"') == "auto"
            else {**dict.fromkeys(before), **_object("plan", text)}
        )
    return changes


def _defaults(run: Any) -> dict[str, str]:
    """The parent's values."""
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
    checkpoints: list[int],
    step: int | None,
    values: dict[str, str],
    refusal: Refusal | None = None,
) -> dict[str, Any]:
    errors = field_errors(refusal) if refusal else {}
    paths = {"steps": "train.steps", "lr": "train.optimizer.lr"}
    named = {
        name: errors.get(name, []) + errors.get(paths.get(name, "-"), [])
        for name in (*FIELDS, "step")
    }
    listed = {id(item) for some in named.values() for item in some}
    other_errors = [item for some in errors.values() for item in some if id(item) not in listed]
    return {
        "run": run,
        "checkpoints": checkpoints,
        "step": step,
        "values": values,
        "refusal": refusal,
        "errors": named,
        "other_errors": other_errors,
        "misfits": refusal is not None and refusal.type == "plan-does-not-fit",
    }


def _object(field: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(
            field,
            _("invalid JSON: %(error)s") % {"error": error},
            'Use {"train": {"clip_norm": 1.0}}.',
        ) from None
    if not isinstance(value, dict):
        raise invalid(field, _("must be a JSON object"), 'Use {"train": {"clip_norm": 1.0}}.')
    return value


def _number(field: str, text: str, kind: Any) -> Any:
    try:
        return kind(text.strip())
    except ValueError:
        raise invalid(
            field,
            _("%(text)r is not a number") % {"text": text.strip()},
            _("Use a number such as 400.") if kind is int else _("Use a number such as 0.001."),
        ) from None
