"""Dashboard pages: the list, one dashboard to look at or to edit, and the form of a new one."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.templatetags.static import static
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts import teams
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, invalid, missing_object
from orchestrator.common.units import is_id
from orchestrator.dashboards import selectors, services
from orchestrator.dashboards.spec import DashboardSpec
from orchestrator.panels.spec import RunsSource
from orchestrator.panels.viewed_runs import PanelViewer
from orchestrator.runs import selectors as runs
from webui.forms.panel_form import panel_form
from webui.panels.panel_cards import panel_card, panel_cards
from webui.views.access import (
    PageRequest,
    field_errors,
    has_role,
    page,
    redirect_with_message,
    require_role,
)

SHOWN = 100


@page
@require_GET
def dashboards(request: PageRequest) -> HttpResponse:
    """List the dashboards that the user sees; `?q=` searches names."""
    q = request.GET.get("q", "").strip()[:120]
    only = {
        name: int(value)
        for name in ("run", "experiment", "team")
        if is_id(value := request.GET.get(name, ""))
    }
    rows = list(selectors.dashboards_visible_to(user=request.user, q=q, **only)[: SHOWN + 1])
    context = {
        "rows": [(row, len(row.document["panels"])) for row in rows[:SHOWN]],
        "more": len(rows) > SHOWN,
        "q": q,
        "new_query": f"?{urlencode(only)}" if only else "",
        "may_create": has_role(request.user, Role.SUBMITTER),
    }
    return render(request, "webui/dashboards/list.html", context)


@page
@require_http_methods(["GET", "POST"])
def create(request: PageRequest) -> HttpResponse:
    """Create a dashboard for `?run=`, `?experiment=`, `?team=` or the user."""
    require_role(request.user, Role.SUBMITTER, _("Creating a dashboard"))
    if request.method == "GET":
        return _form(request)
    typed = request.POST
    try:
        subject = subject_named(request, typed.get("subject", ""))
        spec = DashboardSpec()
        if typed.get("start") == "suggested":
            source = selectors.source_of_subject(**subject)
            names = PanelViewer(request.user).names_of_source(source, "line")
            spec = services.suggested(names, several="run" not in subject)
        row = services.dashboard_create(
            owner=request.user, name=typed.get("name", ""), spec=spec, **subject
        )
    except Refusal as refusal:
        return _form(request, refusal)
    return redirect(f"/dashboards/{row.pk}/?edit=1")


@page
@require_GET
def dashboard(request: PageRequest, id: int) -> HttpResponse:
    """Show a dashboard; `?edit=1` to edit it, `?run=` to show it for one run."""
    row = selectors.dashboard_get(user=request.user, id=id)
    may_edit = selectors.may_edit(row, request.user)
    editing = may_edit and request.GET.get("edit") == "1"
    spec, source, run = selectors.spec_of(row), selectors.source_of(row), None
    if is_id(request.GET.get("run", "")):
        run = runs.run_get(user=request.user, id=request.GET["run"])
        source = RunsSource(runs=[str(run.pk)])
    viewer = PanelViewer(request.user, source)
    if editing:
        ordered = sorted(spec.panels, key=lambda panel: not panel.pinned)
        cards, left_out = [panel_card(panel) for panel in ordered], 0
    else:
        cards, left_out = panel_cards(spec.panels, viewer)
    context = {
        "dashboard": row,
        "cards": cards,
        "left_out": left_out,
        "has_lines": any(card.group == "lines" for card in cards),
        "editing": editing,
        "may_edit": may_edit,
        "may_create": has_role(request.user, Role.SUBMITTER),
        "override": run,
        "subject": source.model_dump(mode="json", exclude_defaults=True),
        "state": {"id": row.pk, "version": row.version, "document": row.document},
        "document": json.dumps(row.document, indent=2, ensure_ascii=False),
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "sentence": _("Drag panels, or move them with the arrows. Each change is saved.")
        if editing
        else _sentence(len(cards), viewer),
    }
    if editing:
        context["form"] = panel_form(request.user)
    return render(request, "webui/dashboards/dashboard.html", context)


@page
@require_GET
def panel(request: PageRequest, id: int, panel: str) -> HttpResponse:
    """Render one panel of a dashboard with the buttons that arrange it."""
    row = selectors.dashboard_get(user=request.user, id=id)
    spec = next((each for each in selectors.spec_of(row).panels if each.id == panel), None)
    if spec is None:
        raise missing_object("panel", panel)
    return render(request, "webui/dashboards/slot.html", {"card": panel_card(spec)})


@page
@require_POST
def copy(request: PageRequest, id: int) -> HttpResponse:
    """Copy a dashboard: one of a team or of others becomes the user's own."""
    row = selectors.dashboard_get(user=request.user, id=id)
    name = _("Copy of %(name)s") % {"name": row.name}
    subject: dict[str, Any] = {"run": row.run} if row.run else {"experiment": row.experiment}
    made = services.dashboard_create(
        owner=request.user,
        name=name[:120],
        spec=selectors.spec_of(row),
        **{key: value for key, value in subject.items() if value is not None},
    )
    return redirect(f"/dashboards/{made.pk}/?edit=1")


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a dashboard."""
    row = selectors.dashboard_get(user=request.user, id=id)
    services.dashboard_delete(dashboard=row, by=request.user)
    message = _("The dashboard %(name)s is deleted.") % {"name": row.name}
    return redirect_with_message(request, message, "dashboards")


def _sentence(panels: int, viewer: PanelViewer) -> str:
    viewed = viewer.runs_of_source(viewer.subject)
    text = ngettext("%(count)s panel", "%(count)s panels", panels) % {"count": panels}
    count = len(viewed.runs)
    if viewed.more:
        return _("%(panels)s; the newest %(count)s runs.") % {"panels": text, "count": count}
    if count == 1:
        return _("%(panels)s of run %(id)s, %(name)s.") % {
            "panels": text,
            "id": viewed.runs[0].pk,
            "name": viewed.runs[0].name,
        }
    shown = ngettext("%(count)s run", "%(count)s runs", count) % {"count": count}
    return _("%(panels)s; %(runs)s.") % {"panels": text, "runs": shown}


def subject_named(request: PageRequest, text: str) -> dict[str, Any]:
    """What `run:12`, `experiment:3`, `team:2` or an empty text names."""
    kind, _colon, id = text.partition(":")
    if not text:
        return {}
    if not is_id(id) or kind not in ("run", "experiment", "team"):
        message = _("%(text)r is not a run, experiment or team") % {"text": text[:40]}
        raise invalid("subject", message, _("Use for example run:12."))
    user = request.user
    if kind == "run":
        return {"run": runs.run_get(user=user, id=id)}
    if kind == "experiment":
        return {"experiment": runs.experiment_get(user=user, id=id)}
    return {"team": teams.team_get(user=user, id=id)}


def _form(request: PageRequest, refusal: Refusal | None = None) -> HttpResponse:
    chosen = request.POST.get("subject", "")
    fixed: tuple[str, str] | None = None
    for kind in ("run", "experiment"):
        if is_id(id := request.GET.get(kind, "")):
            item = subject_named(request, f"{kind}:{id}")[kind]
            title = _("The run %(name)s") if kind == "run" else _("The experiment %(name)s")
            fixed = (f"{kind}:{id}", title % {"name": item.name})
            chosen = chosen or fixed[0]
    if is_id(id := request.GET.get("team", "")):
        chosen = chosen or f"team:{id}"
    options = [fixed] if fixed else []
    options += [
        (f"team:{team.pk}", _("The team %(name)s") % {"name": team.name})
        for team in selectors.teams_written_by(user=request.user)
    ]
    context = {
        "options": options,
        "chosen": chosen,
        "typed": request.POST,
        "refusal": refusal,
        "errors": field_errors(refusal) if refusal else {},
    }
    status = refusal.status if refusal else 200
    return render(request, "webui/dashboards/new.html", context, status=status)
