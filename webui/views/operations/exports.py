"""The page of exports: request, download and delete archives of runs and experiments."""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST

from orchestrator.background_jobs.exports import requests
from orchestrator.common.errors import invalid
from webui.views.access import PageRequest, page, redirect_with_message


@page
@require_http_methods(["GET", "POST"])
def exports(request: PageRequest) -> HttpResponse:
    """List the user's exports; POST requests one."""
    if request.method == "POST":
        kind, text = request.POST.get("kind", "run"), request.POST.get("target", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise invalid(
                "target",
                _("%(text)s is not a number") % {"text": repr(text[:20])},
                _("Enter the number of a run or experiment, such as 12."),
            )
        target = int(text)
        if kind == "experiment":
            requests.export_request(by=request.user, experiment=target)
        else:
            requests.export_request(by=request.user, run=target)
        message = _("The export is queued; reload this page to download it.")
        return redirect_with_message(request, message, "exports")
    context = {
        "rows": list(requests.exports_of(user=request.user)),
        "run": request.GET.get("run", "")[:20],
    }
    return render(request, "webui/exports.html", context)


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete an export."""
    requests.export_delete(export=requests.export_get(user=request.user, id=id))
    return redirect_with_message(request, _("The export is deleted."), "exports")
