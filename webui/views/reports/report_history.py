"""Pages of a report's versions: list, one of them, comparison, restore."""

from __future__ import annotations

from typing import Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common.errors import invalid
from orchestrator.common.units import is_id
from orchestrator.reports import differences, selectors, services
from webui.views.access import PageRequest, page, redirect_with_message
from webui.views.reports.reports import shown

_SHOWN: Final = 200


@page
@require_GET
def versions(request: PageRequest, id: int) -> HttpResponse:
    """List versions and compare two: by default the newest one with the one before."""
    report = selectors.report_get(user=request.user, id=id)
    to = selectors.version_get(report=report, number=request.GET.get("to") or report.head)
    start = request.GET.get("from") or max(1, to.number - 1)
    old = selectors.version_get(report=report, number=start)
    added, removed = differences.changed_lines(old.text, to.text)
    rows = list(selectors.versions_of(report=report).defer("text")[: _SHOWN + 1])
    context = {
        "report": report,
        "rows": rows[:_SHOWN],
        "more": len(rows) > _SHOWN,
        "old": old,
        "new": to,
        "lines": differences.difference(old.text, to.text),
        "added": added,
        "removed": removed,
        "may_edit": selectors.may_edit(report, request.user),
    }
    return render(request, "webui/reports/versions.html", context)


@page
@require_GET
def version(request: PageRequest, id: int, number: int) -> HttpResponse:
    """Show one version."""
    report = selectors.report_get(user=request.user, id=id)
    return shown(request, report, selectors.version_get(report=report, number=number))


@page
@require_POST
def restore(request: PageRequest, id: int, number: int) -> HttpResponse:
    """Save an old version as the newest one."""
    report = selectors.report_get(user=request.user, id=id)
    seen = request.POST.get("version", str(report.head))
    if not is_id(seen):
        raise invalid("version", _("%(text)r is not a version") % {"text": seen[:40]})
    services.report_restore(report=report, by=request.user, number=number, version=int(seen))
    message = _("Version %(number)s is restored as version %(head)s.")
    values = {"number": number, "head": report.head}
    return redirect_with_message(request, message % values, "report", report.pk)
