"""The diff of a script run's code as a file."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils.http import content_disposition_header
from django.views.decorators.http import require_GET

from orchestrator.runs import selectors
from orchestrator.runs.code import record
from orchestrator.tracking import selectors as tracking
from webui.views.access import PageRequest, page


@page
@require_GET
def diff(request: PageRequest, id: int) -> HttpResponse:
    """The changes since the commit, as `git apply` reads them; empty without git."""
    run = selectors.run_get(user=request.user, id=id)
    code = record.code_of(run)
    data = b"" if code is None else bytes(code.diff)
    if code is None and (details := tracking.details_of(run=run)) is not None:
        data = details.diff.encode()
    response = HttpResponse(data, content_type="text/x-diff")
    name = f"run-{id}.diff"
    response["Content-Disposition"] = content_disposition_header(True, name) or ""
    return response
