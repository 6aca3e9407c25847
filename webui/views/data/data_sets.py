"""Pages of data sets: list and registration, one version with its files and lineage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.datasets import selectors, services
from orchestrator.runs.store import access
from orchestrator.runs.submission.examples.example_preview import example_files
from webui.views.access import PageRequest, has_role, page, redirect_with_message, require_role
from workers.contracts.specs.data import EXAMPLE_FORMATS

SHOWN: Final = 200
FILES_SHOWN: Final = 100
# state → what a page says, and its class
STATES: Final = {
    "waiting": (gettext_noop("reading"), ""),
    "fingerprinted": (gettext_noop("on this machine"), ""),
    "stored": (gettext_noop("in the store"), "good"),
    "failed": (gettext_noop("failed"), "bad"),
}


@page
@require_http_methods(["GET", "POST"])
def data_sets(request: PageRequest) -> HttpResponse:
    """List the newest version of each name; POST registers the next version of one."""
    form: dict[str, Any] = {"values": request.GET}
    status = 200
    if request.method == "POST":
        try:
            row = _register(request)
            return redirect("data-set-version", row.name, row.version)
        except Refusal as refusal:
            errors = refusal.errors or [{"message": refusal.detail}]
            form, status = {"errors": errors, "values": request.POST}, refusal.status
    rows = list(selectors.newest_of_each(user=request.user)[:SHOWN])
    may_register = has_role(request.user, Role.SUBMITTER)
    context = {
        "title": _("Data sets"),
        "sentence": _sentence(rows),
        "data_tab": "sets",
        "rows": [{"row": row, **_state(row)} for row in rows],
        "may_register": may_register,
        "formats": services.FORMATS,
        "files": example_files() if may_register else [],
    }
    return render(request, "webui/data/sets.html", context | form, status=status)


@page
@require_GET
def data_set(request: PageRequest, name: str, version: int | None = None) -> HttpResponse:
    """Show a version, the newest by default: files, the run that wrote it, runs that use it."""
    versions = selectors.versions_of(user=request.user, name=name)
    newest = next((row for row in versions if row.deleted is None), versions[0])
    row = newest
    if version is not None:
        row = selectors.version_get(user=request.user, name=name, version=version)
    users = selectors.users_of(row=row, user=request.user)
    files = [{"name": each, **row.files[each]} for each in sorted(row.files)[:FILES_SHOWN]]
    context = {
        "title": row.label,
        "sentence": _version_sentence(row, len(users)),
        "data_tab": "sets",
        "row": row,
        **_state(row),
        "versions": [{"row": each, **_state(each)} for each in versions],
        "source": selectors.source_of(row=row, user=request.user),
        "users": users,
        "file_rows": files,
        "more_files": len(row.files) - len(files),
        "new_run": _new_run(row) if row.usable else "",
        "preview": _preview(row),
        "may_delete": row.deleted is None
        and (row.owner_id == request.user.pk or has_role(request.user, Role.OPERATOR)),
    }
    return render(request, "webui/data/set.html", context)


@page
@require_POST
def delete(request: PageRequest, name: str, version: int) -> HttpResponse:
    """Delete a version."""
    row = selectors.version_get(user=request.user, name=name, version=version)
    services.data_set_delete(row=row, by=request.user)
    return redirect_with_message(
        request, _("Data set %(name)s deleted.") % {"name": row.label}, "data-sets"
    )


def _register(request: PageRequest) -> Any:
    require_role(request.user, Role.SUBMITTER, _("Registering a data set"))
    run = request.POST.get("run", "").strip()
    if run and not (run.isascii() and run.isdecimal() and len(run) < 19):
        raise invalid("run", _("%(value)s is not a run's number") % {"value": run[:40]})
    return services.data_set_register(
        by=request.user,
        name=request.POST.get("name", ""),
        path=request.POST.get("path", "").strip() or None,
        run=int(run) if run else None,
        format=request.POST.get("format") or None,
        notes=request.POST.get("notes", "").strip(),
    )


def _sentence(rows: list[Any]) -> str:
    text = _(
        "Named versions of files with a fingerprint. A run that names one keeps its version, and "
        "nodes that lack the files read them from the store."
    )
    if not access.configured():
        text += " " + _("No store is configured, so nodes need the files themselves.")
    failed = sum(row.state == "failed" for row in rows)
    if failed:
        text = (
            ngettext(
                "%(count)s data set cannot be used.", "%(count)s data sets cannot be used.", failed
            )
            % {"count": failed}
            + f" {text}"
        )
    return text


def _version_sentence(row: Any, users: int) -> str:
    if row.deleted is not None:
        return _("This version was deleted; runs can no longer use it.")
    if row.state == "failed":
        return f"{row.problem} {row.hint}"
    if row.state == "waiting":
        return row.problem or _("Its files are being read; reload this page in a moment.")
    text = _("No run uses it yet.")
    if users:
        text = ngettext("Used by %(count)s run.", "Used by %(count)s runs.", users)
        text %= {"count": users}
    if row.problem:
        text += " " + _("Its copy to the store is delayed: %(problem)s") % {
            "problem": f"{row.problem} {row.hint}"
        }
    return text


def _state(row: Any) -> dict[str, str]:
    if row.deleted is not None:
        return {"state": _("deleted"), "state_class": ""}
    text, css = STATES[row.state]
    return {"state": _(text), "state_class": css}


def _new_run(row: Any) -> str:
    spec = {"kind": "train", "data": {"dataset": row.label}}
    return f"{reverse('run-new')}?{urlencode({'spec': json.dumps(spec)})}"


def _preview(row: Any) -> str:
    """The address of the preview of a file of examples; empty for others."""
    if row.format not in EXAMPLE_FORMATS or row.folder or not row.usable or not row.shared:
        return ""
    for root in settings.DATA_ROOTS:
        top = Path(os.path.realpath(root))
        if Path(row.path).is_relative_to(top):
            query = {"path": str(Path(row.path).relative_to(top)), "format": row.format}
            return f"{reverse('data')}?{urlencode(query)}"
    return ""
