"""The page of storage for operators: what garbage collection deletes, deletions, orphans."""

from __future__ import annotations

from itertools import islice
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.db.models import Sum
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.background_jobs import selectors as jobs
from orchestrator.runs import storage as selectors
from orchestrator.runs.store import access, copies
from webui.views.access import PageRequest, page, require_role

SHOWN = 100
_KINDS = {"checkpoint": gettext_noop("checkpoint"), "attempt": gettext_noop("attempt folder")}
_REASONS = {
    "age": gettext_noop("age"),
    "size": gettext_noop("total size"),
    "superseded": gettext_noop("newer checkpoints"),
    "discarded": gettext_noop("no use"),
    "deleted": gettext_noop("the data set was deleted"),
}


@page
@require_GET
def storage(request: PageRequest) -> HttpResponse:
    """Show candidates, newest deletions and orphaned folders."""
    require_role(request.user, Role.OPERATOR, _("The storage page"))
    matches = list(islice(jobs.garbage_candidates(user=request.user), SHOWN + 1))
    candidates = [
        {"row": row, "kind": _(_KINDS[row.kind]), "reason": _(_REASONS[row.reason])}
        for row in matches[:SHOWN]
    ]
    deletions = selectors.deletions(user=request.user)
    folders = selectors.folders(user=request.user)
    env = settings.ENV
    context = {
        "active": bool(env.gc_checkpoint_days or env.gc_checkpoint_gb or env.gc_folder_days),
        "candidates": candidates,
        "more": len(matches) > SHOWN,
        "bytes": sum(row.bytes for row in matches[:SHOWN]),
        "deletions": [
            {"row": row, "kind": _(_KINDS.get(row.kind, row.kind))} for row in deletions[:SHOWN]
        ],
        "freed": deletions.aggregate(sum=Sum("freed"))["sum"] or 0,
        "stored": folders.aggregate(sum=Sum("bytes"))["sum"] or 0,
        "orphans": list(folders.filter(orphan=True).order_by("-bytes")[:SHOWN]),
    }
    return render(request, "webui/storage.html", {**context, **_store(request)})


@page
@require_POST
def check_store(request: PageRequest) -> HttpResponse:
    """Write, read and delete an object of the store."""
    problem = copies.check(user=request.user)
    if problem:
        messages.error(request, _("The store cannot be used: %(problem)s") % {"problem": problem})
    else:
        messages.success(request, _("This machine can write, read and delete in the store."))
    return redirect("storage")


def _store(request: PageRequest) -> dict[str, Any]:
    """The part of the context about the store."""
    if (where := access.access()) is None:
        return {"store": None}
    matches = list(islice(jobs.store_candidates(user=request.user), SHOWN + 1))
    return {
        "store": where,
        "totals": copies.totals(user=request.user),
        "problems": list(copies.problems()[:SHOWN]),
        "copy_candidates": [
            {
                "row": row,
                "reason": _(_REASONS[row.reason]),
                "data_set": row.data_set,
                "url": _url(row),
            }
            for row in matches[:SHOWN]
        ],
        "copy_bytes": sum(row.bytes for row in matches[:SHOWN]),
    }


def _url(row: Any) -> str:
    """The page of the run or data set whose copy it is."""
    if not row.data_set:
        return reverse("run", args=[row.run])
    name, _at, version = row.data_set.partition("@")
    return reverse("data-set-version", args=[name, int(version)])
