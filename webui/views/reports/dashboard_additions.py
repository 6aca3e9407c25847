"""The dialog "Add to dashboard": a chart of a run page or of Compare becomes a panel."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods
from pydantic import ValidationError

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, invalid, invalid_document
from orchestrator.common.units import is_id
from orchestrator.dashboards import selectors, services
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.panels.spec import PanelSpec
from orchestrator.runs import selectors as runs
from webui.presentation.problems import problem_text
from webui.views.access import PageRequest, page, require_role
from webui.views.reports.dashboards import subject_named
from workers.contracts.base import validation_problems


@page
@require_http_methods(["GET", "POST"])
def add_panel(request: PageRequest) -> HttpResponse:
    """Render the dialog for `?run=`, or without a run; POST adds the panel, answers with JSON."""
    require_role(request.user, Role.SUBMITTER, _("Changing a dashboard"))
    if request.method == "GET":
        return render(request, "webui/dashboards/add_panel.html", _choices(request))
    try:
        row = _added(request)
    except Refusal as refusal:
        texts = [problem_text(error) for error in refusal.errors] or [refusal.detail]
        return JsonResponse({"detail": " ".join(texts)}, status=refusal.status)
    message = _("The chart is on the dashboard %(name)s.") % {"name": row.name}
    return JsonResponse({"message": message, "url": reverse("dashboard", args=(row.pk,))})


def _added(request: PageRequest) -> Any:
    typed = request.POST
    panel, target = _panel(request), typed.get("target", "")
    if is_id(target):
        row = selectors.dashboard_get(user=request.user, id=target)
        return services.panel_add(dashboard=row, by=request.user, panel=panel)
    return services.dashboard_create(
        owner=request.user,
        name=typed.get("name", ""),
        spec=DashboardSpec(panels=[panel]),
        **subject_named(request, target.removeprefix("new")),
    )


def _panel(request: PageRequest) -> PanelSpec:
    typed = request.POST
    try:
        document = json.loads(typed.get("panel", ""))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise invalid("panel", _("the panel is not a JSON object"), _("Reload the page."))
    if title := typed.get("title", "").strip():
        document["title"] = title[:200]
    if typed.get("runs") != "chart":
        document.pop("runs", None)
    document["pinned"] = typed.get("pinned") == "on"
    try:
        return PanelSpec.from_dict(document)
    except ValidationError as error:
        raise invalid_document(validation_problems(error)) from None


def _choices(request: PageRequest) -> dict[str, Any]:
    user, run = request.user, None
    if is_id(id := request.GET.get("run", "")):
        run = runs.run_get(user=user, id=id)
    options = [
        (str(row.pk), _("%(name)s (%(subject)s)") % {"name": row.name, "subject": _of(row)})
        for row in selectors.dashboards_editable_by(user=user, run=run)
    ]
    return {"options": options, "new": _new_for(request, run), "run": run}


def _new_for(request: PageRequest, run: Any) -> list[tuple[str, str]]:
    new = []
    if run is not None:
        new.append((f"run:{run.pk}", _("for this run")))
        if run.experiment is not None:
            name = run.experiment.name
            text = _("for the experiment %(name)s") % {"name": name}
            new.append((f"experiment:{run.experiment_id}", text))
    new += [
        (f"team:{team.pk}", _("for the team %(name)s") % {"name": team.name})
        for team in selectors.teams_written_by(user=request.user)
    ]
    return [*new, ("new", _("for yourself"))]


def _of(row: Any) -> str:
    if row.run is not None:
        return _("run %(id)s") % {"id": row.run_id}
    if row.experiment is not None:
        return _("experiment %(name)s") % {"name": row.experiment.name}
    if row.team is not None:
        return _("team %(name)s") % {"name": row.team.name}
    return _("yours")
