"""Pages that write reports: create, edit, and the preview while typing."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, invalid
from orchestrator.common.units import is_id
from orchestrator.reports import differences, selectors, services
from orchestrator.reports.readers import reader
from orchestrator.reports.run_tables import table_block
from orchestrator.reports.services import VersionConflict
from orchestrator.run_table import selectors as run_table
from webui.reports.parts import report_parts
from webui.views.access import PageRequest, field_errors, page, redirect_with_message, require_role

_MOST_RUNS: Final = 100


@page
@require_http_methods(["GET", "POST"])
def create(request: PageRequest) -> HttpResponse:
    """Write a new report; `?runs=1,2` begins it with a table of runs."""
    require_role(request.user, Role.SUBMITTER, _("Writing reports"))
    if request.method == "POST":
        typed = _typed(request)
        try:
            made = services.report_create(owner=request.user, **typed)
        except Refusal as refusal:
            return _form(request, typed, refusal=refusal)
        return redirect_with_message(request, _("Report created."), "report", made.pk)
    ids = [text for text in request.GET.get("runs", "").split(",") if is_id(text)][:_MOST_RUNS]
    return _form(request, {"title": "", "text": table_block(ids), "note": ""})


@page
@require_http_methods(["GET", "POST"])
def edit(request: PageRequest, id: int) -> HttpResponse:
    """Edit a report; a newer version of someone else is shown next to the change."""
    report = selectors.report_get(user=request.user, id=id)
    services.require_edit(report, request.user)
    base = selectors.version_get(report=report)
    if request.method != "POST":
        shown = {"title": base.title, "text": base.text, "note": ""}
        return _form(request, shown, report=report, version=base.number)
    typed, number = _typed(request), request.POST.get("version", str(base.number))
    if not is_id(number):
        raise invalid("version", _("%(text)r is not a version") % {"text": number[:40]})
    try:
        changed = services.report_update(
            report=report, by=request.user, version=int(number), **typed
        )
    except VersionConflict as conflict:
        return _conflict_form(request, report, conflict, typed)
    except Refusal as refusal:
        return _form(request, typed, report=report, version=int(number), refusal=refusal)
    if changed.head == int(number):
        return redirect_with_message(request, _("Nothing was changed."), "report", report.pk)
    message = _("Saved as version %(number)s.") % {"number": changed.head}
    return redirect_with_message(request, message, "report", report.pk)


@page
@require_POST
def preview(request: PageRequest) -> HttpResponse:
    """Render the typed text as a part of the edit page."""
    require_role(request.user, Role.SUBMITTER, _("Writing reports"))
    wanted, report = request.POST.get("report", ""), None
    if wanted:
        report = selectors.report_get(user=request.user, id=wanted)
    text = request.POST.get("text", "")[: services.MOST_TEXT].replace("\r\n", "\n")
    parts = report_parts(text=text, readers=reader(request.user), report=report)
    context = {**parts, "preview": True}
    return render(request, "webui/reports/body.html", context)


def _form(
    request: PageRequest,
    shown: dict[str, str],
    *,
    report: Any = None,
    version: int = 0,
    refusal: Refusal | None = None,
    **more: Any,
) -> HttpResponse:
    errors = field_errors(refusal) if refusal else {}
    context = {
        "report": report,
        "version": version,
        "shown": shown,
        "refusal": refusal,
        "errors": errors,
        "columns": run_table.completions(run_table.known_names(user=request.user)),
        **report_parts(text=shown["text"], readers=reader(request.user), report=report),
        "preview": True,
        **more,
    }
    status = refusal.status if refusal else 200
    return render(request, "webui/reports/form.html", context, status=status)


def _conflict_form(
    request: PageRequest, report: Any, conflict: VersionConflict, typed: dict[str, str]
) -> HttpResponse:
    """The form of the newest version, with both texts; the person decides what to save."""
    current = conflict.current
    text = typed["text"] if conflict.merged is None else conflict.merged
    more = {
        "conflict": conflict,
        "theirs": differences.difference(conflict.base.text, current.text),
        "yours": differences.difference(current.text, conflict.submitted_text),
    }
    shown = {**typed, "text": text}
    return _form(request, shown, report=report, version=current.number, refusal=conflict, **more)


def _typed(request: PageRequest) -> dict[str, str]:
    names = ("title", "text", "note")
    return {name: request.POST.get(name, "").replace("\r\n", "\n") for name in names}
