"""Share links: create, list and revoke them; the page that a link shows without a login."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.dateparse import parse_date
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.common import clock
from orchestrator.common.errors import Refusal, invalid
from orchestrator.reports import selectors, services, share_links
from orchestrator.reports.readers import Readers
from webui.reports.parts import report_parts
from webui.views.access import PageRequest, field_errors, page, redirect_with_message

SPANS: Final = {
    "1": gettext_noop("1 day"),
    "7": gettext_noop("1 week"),
    "30": gettext_noop("1 month"),
    "90": gettext_noop("3 months"),
    "365": gettext_noop("1 year"),
}
# of an ended link: title and sentence
ENDED: Final = {
    "expired": (
        gettext_noop("This link has expired"),
        gettext_noop("The person who sent it chose a date after which it no longer works."),
    ),
    "revoked": (
        gettext_noop("This link was revoked"),
        gettext_noop("Someone who edits the report ended it."),
    ),
    "disabled": (
        gettext_noop("This link no longer works"),
        gettext_noop("The person who created it no longer has access to the report."),
    ),
    "unknown": (
        gettext_noop("This link is not valid"),
        gettext_noop(
            "It may be incomplete, or the report was deleted. Check that you copied all of it."
        ),
    ),
}


@page
@require_http_methods(["GET", "POST"])
def share(request: PageRequest, id: int) -> HttpResponse:
    """List share links; POST creates one."""
    report = selectors.report_get(user=request.user, id=id)
    services.require_edit(report, request.user)
    context: dict[str, Any] = {"typed": request.POST}
    status = 200
    if request.method == "POST":
        try:
            link = share_links.link_create(
                report=report, by=request.user, expires=_expires(request), note=_note(request)
            )
        except Refusal as refusal:
            context |= {"refusal": refusal, "errors": field_errors(refusal)}
            status = refusal.status
        else:
            message = _("The link is ready; it works until %(day)s.")
            day = f"{link.expires:%Y-%m-%d}"
            return redirect_with_message(request, message % {"day": day}, "report-share", id)
    rows = [_row(request, link) for link in selectors.links_of(report=report)]
    context |= {
        "report": report,
        "rows": rows,
        "active": sum(row["state"] == "active" for row in rows),
        "spans": [(days, _(text)) for days, text in SPANS.items()],
        "usual": str(share_links.USUAL_DAYS),
    }
    return render(request, "webui/reports/share.html", context, status=status)


@page
@require_POST
def revoke(request: PageRequest, id: int, link: int) -> HttpResponse:
    """End a share link."""
    report = selectors.report_get(user=request.user, id=id)
    services.require_edit(report, request.user)
    row = selectors.link_get(report=report, id=link)
    share_links.link_revoke(link=row, by=request.user)
    message = _("The link is revoked: it now shows that it has ended.")
    return redirect_with_message(request, message, "report-share", id)


@require_GET
def shared(request: HttpRequest, token: str) -> HttpResponse:
    """Show a shared report, also without a login; an ended link shows why."""
    link = share_links.link_by_token(token)
    state = "unknown" if link is None else selectors.link_state(link)
    if link is None or state != "active":
        title, text = ENDED[state]
        ended = {"title": _(title), "text": _(text), "state": state, "link": link}
        status = 404 if state == "unknown" else 410
        return _private(render(request, "webui/reports/ended_link.html", ended, status=status))
    share_links.link_opened(link)
    version = selectors.version_get(report=link.report)
    readers = Readers((link.author, version.author), anonymous=True)
    context = {
        "report": link.report,
        "version": version,
        "link": link,
        **report_parts(text=version.text, readers=readers, report=link.report),
    }
    return _private(render(request, "webui/reports/shared.html", context))


def _private(response: HttpResponse) -> HttpResponse:
    """Not stored by caches or search engines; the address is not sent to other sites."""
    response["Cache-Control"] = "no-store"
    response["Referrer-Policy"] = "no-referrer"
    response["X-Robots-Tag"] = "noindex"
    return response


def _row(request: PageRequest, link: Any) -> dict[str, Any]:
    row = share_links.serialize_link(link, request.user)
    url = request.build_absolute_uri(row["path"]) if row["path"] else ""
    return {**row, "url": url, "row": link}


def _note(request: HttpRequest) -> str:
    return request.POST.get("note", "")


def _expires(request: HttpRequest) -> Any:
    """The chosen end: a number of days, or the end of a day (UTC)."""
    now, day = clock.now(), request.POST.get("day", "").strip()
    if day:
        try:
            date = parse_date(day)
        except ValueError:
            date = None
        if date is None:
            message = _("%(day)r is not a day") % {"day": day[:20]}
            raise invalid("expires", message, _("Use a day such as 2026-12-31."))
        return now.replace(
            year=date.year, month=date.month, day=date.day, hour=23, minute=59, second=59
        )
    days = request.POST.get("days", str(share_links.USUAL_DAYS))
    if days not in SPANS:
        message = _("%(days)r is not a number of days") % {"days": days[:20]}
        raise invalid("expires", message, ", ".join(SPANS))
    return now + timedelta(days=int(days))
