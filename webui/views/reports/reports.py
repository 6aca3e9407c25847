"""Report pages: the list, a report with its comments, and what happens to comments."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common.errors import invalid
from orchestrator.reports import comments, selectors, services
from orchestrator.reports.readers import reader
from webui.presentation.markdown import render_markdown
from webui.reports.parts import report_parts
from webui.views.access import PageRequest, page, redirect_with_message

SHOWN: Final = 100


@page
@require_GET
def reports(request: PageRequest) -> HttpResponse:
    """List reports, those that changed last first."""
    q = request.GET.get("q", "").strip()[:200]
    visible = selectors.reports_visible_to(user=request.user, q=q)
    rows: list[Any] = list(visible.order_by("-updated", "-pk")[: SHOWN + 1])
    context = {
        "rows": rows[:SHOWN],
        "more": len(rows) > SHOWN,
        "q": q,
        "may_write": selectors.may_write(request.user),
        "sentence": _list_sentence(rows),
    }
    return render(request, "webui/reports/reports.html", context)


@page
@require_GET
def report(request: PageRequest, id: int) -> HttpResponse:
    """Show the newest version."""
    row = selectors.report_get(user=request.user, id=id)
    return shown(request, row, selectors.version_get(report=row))


def shown(request: PageRequest, row: Any, version: Any) -> HttpResponse:
    """Render a version of a report."""
    user = request.user
    threads = selectors.threads_of(report=row)
    context = {
        "report": row,
        "version": version,
        "newest": version.number == row.head,
        **report_parts(text=version.text, readers=reader(user), report=row),
        "threads": [_thread(thread, user) for thread in threads],
        "open_comments": sum(thread.comment.resolved is None for thread in threads),
        "may_edit": selectors.may_edit(row, user),
        "may_delete": services.may_delete(row, user),
    }
    return render(request, "webui/reports/report.html", context)


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a report."""
    row = selectors.report_get(user=request.user, id=id)
    services.report_delete(report=row, by=request.user)
    message = _("Report %(title)s deleted.") % {"title": row.title}
    return redirect_with_message(request, message, "reports")


@page
@require_POST
def comment_new(request: PageRequest, id: int) -> HttpResponse:
    """Add a comment or an answer."""
    row, parent = selectors.report_get(user=request.user, id=id), None
    if wanted := request.POST.get("parent", ""):
        parent = selectors.comment_get(report=row, id=wanted)
    text = request.POST.get("text", "")
    made = comments.comment_create(report=row, by=request.user, text=text, parent=parent)
    return redirect(f"{reverse('report', args=[row.pk])}#comment-{made.pk}")


@page
@require_POST
def comment_change(request: PageRequest, id: int, comment: int) -> HttpResponse:
    """Resolve, reopen or delete a comment."""
    row = selectors.report_get(user=request.user, id=id)
    which = selectors.comment_get(report=row, id=comment)
    action = request.POST.get("action", "resolve")
    if action not in ("resolve", "reopen", "delete"):
        message = _("%(name)r is not possible") % {"name": action[:40]}
        raise invalid("action", message, _("Use resolve, reopen or delete."))
    if action == "delete":
        comments.comment_delete(comment=which, by=request.user)
        return redirect_with_message(request, _("Comment deleted."), "report", row.pk)
    comments.comment_resolve(comment=which, by=request.user, resolved=action == "resolve")
    message = _("Comment resolved.") if action == "resolve" else _("Comment reopened.")
    return redirect_with_message(request, message, "report", row.pk)


def _thread(thread: Any, user: Any) -> dict[str, Any]:
    return {
        "comment": _comment(thread.comment, user),
        "answers": [_comment(answer, user) for answer in thread.answers],
        "resolved": thread.comment.resolved is not None,
    }


def _comment(comment: Any, user: Any) -> dict[str, Any]:
    return {
        "row": comment,
        "html": render_markdown(comment.text),
        "may_delete": comments.may_delete(comment, user),
    }


def _list_sentence(rows: list[Any]) -> str:
    if not rows:
        return _("Findings from runs, with charts that stay current.")
    number = min(len(rows), SHOWN)
    text = ngettext("%(count)s report", "%(count)s reports", number) % {"count": number}
    waiting = sum(row.open_comments for row in rows[:SHOWN])
    if not waiting:
        return text + _("; no open comments.")
    more = ngettext("%(count)s open comment.", "%(count)s open comments.", waiting)
    return f"{text}; {more % {'count': waiting}}"
