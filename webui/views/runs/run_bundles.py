"""Reproducibility bundles by page: download one, submit one."""

from __future__ import annotations

import json

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common.errors import Refusal
from orchestrator.runs import bundles, selectors
from webui.views.access import PageRequest, page

LARGEST = 10 << 20


@page
@require_GET
def download(request: PageRequest, id: int) -> HttpResponse:
    """The bundle of a run as a file."""
    bundle = bundles.bundle_of(selectors.run_get(user=request.user, id=id))
    response = HttpResponse(
        json.dumps(bundle, indent=1, ensure_ascii=False), content_type="application/json"
    )
    name = f"run-{id}-bundle.json"
    response["Content-Disposition"] = content_disposition_header(True, name) or ""
    return response


@page
@require_POST
def submit(request: PageRequest) -> HttpResponse:
    """Submit an uploaded bundle; a refusal becomes a message on the page of new runs."""
    file = request.FILES.get("bundle")
    try:
        if file is None or (file.size or 0) > LARGEST:
            raise ValueError
        document = json.loads(file.read())
    except (ValueError, RecursionError):
        messages.error(request, _("Choose the file of a bundle, which is JSON of at most 10 MiB."))
        return redirect("run-new")
    try:
        run = bundles.bundle_submit(
            owner=request.user,
            bundle=document,
            other_versions=bool(request.POST.get("other_versions")),
        )
    except Refusal as refusal:
        hints = [item["hint"] for item in refusal.errors if item.get("hint")]
        messages.error(request, " ".join([refusal.detail, *hints[:3]]))
        return redirect("run-new")
    messages.success(request, _("Run %(id)s repeats the run of the bundle.") % {"id": run.pk})
    return redirect("run", run.pk)
