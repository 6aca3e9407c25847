"""Reports: read, create, change; versions, comments and share links."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.lookup import MAX_ID
from orchestrator.api.http.pagination import paginated
from orchestrator.api.schemas.base import aware
from orchestrator.api.schemas.reports import (
    CommentChange,
    CommentOut,
    DiffOut,
    LinkOut,
    NewComment,
    NewLink,
    NewReport,
    ReportChange,
    ReportOut,
    ReportRow,
    Restore,
    VersionOut,
    VersionRow,
)
from orchestrator.reports import comments, differences, selectors, services, share_links
from workers.contracts.base import Contract

router = Router(tags=["reports"])
LOCATION = "/api/v1/reports/{id}"


class Wanted(Contract):
    """Which reports."""

    q: str = Field(default="", max_length=200, description="a part of title or owner")


class Compared(Contract):
    """Two versions; by default the newest one with the one before."""

    from_version: int | None = Field(default=None, ge=1, le=2**31 - 1)
    to_version: int | None = Field(default=None, ge=1, le=2**31 - 1)


@router.get("", response=list[ReportRow], auth=require_scope("read"), summary="List reports")
@paginated(name="reports", newest_first=True, serialize=selectors.serialize_report)
def report_list(request: HttpRequest, wanted: Query[Wanted]) -> Any:
    """Reports of you and your teams, newest first, without their texts."""
    return selectors.reports_visible_to(user=user(request), q=wanted.q.strip()).order_by("-pk")


@router.post("", response={201: ReportOut}, auth=require_scope("runs"), summary="Create a report")
@creates(ReportOut, location=LOCATION)
def report_create(request: HttpRequest, body: NewReport) -> Any:
    """Creates a report. 422 names the line of a block that cannot be read."""
    return _full(services.report_create(owner=user(request), **body.model_dump()))


@router.get("/{int:id}", response=ReportOut, auth=require_scope("read"), summary="Get a report")
def report_detail(request: HttpRequest, id: int) -> Any:
    """One report with the text of its newest version."""
    return _full(_report(request, id))


@router.patch(
    "/{int:id}", response=ReportOut, auth=require_scope("runs"), summary="Change a report"
)
def report_change(request: HttpRequest, id: int, body: ReportChange) -> Any:
    """Saves a new version. 409 `version-conflict` if `version` is not the newest one: the problem
    has `current`, `submitted`, their `diff`, and `merged` if the changes are in different places.
    """
    report = services.report_update(
        report=_report(request, id), by=user(request), **body.model_dump()
    )
    return _full(report)


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a report"
)
def report_delete(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes it with versions, comments and links."""
    services.report_delete(report=_report(request, id), by=user(request))
    return HttpResponse(status=204)


@router.get(
    "/{int:id}/versions",
    response=list[VersionRow],
    auth=require_scope("read"),
    summary="List versions",
)
@paginated(
    name="report-versions",
    newest_first=True,
    key=lambda row: int(row.number),
    serialize=selectors.serialize_version_row,
)
def version_list(request: HttpRequest, id: int) -> Any:
    """All versions, newest first, without their texts."""
    return list(selectors.versions_of(report=_report(request, id)).defer("text"))


@router.get(
    "/{int:id}/versions/{int:version}",
    response=VersionOut,
    auth=require_scope("read"),
    summary="Get a version",
)
def version_detail(request: HttpRequest, id: int, version: int) -> Any:
    """One version with its text."""
    row = selectors.version_get(report=_report(request, id), number=version)
    return selectors.serialize_version(row)


@router.post(
    "/{int:id}/versions/{int:version}/restore",
    response=ReportOut,
    auth=require_scope("runs"),
    summary="Restore a version",
)
def version_restore(request: HttpRequest, id: int, version: int, body: Restore) -> Any:
    """Saves an old version as the newest one. 409 like a change."""
    report = services.report_restore(
        report=_report(request, id), by=user(request), number=version, version=body.version
    )
    return _full(report)


@router.get(
    "/{int:id}/diff", response=DiffOut, auth=require_scope("read"), summary="Compare versions"
)
def version_diff(request: HttpRequest, id: int, wanted: Query[Compared]) -> Any:
    """Two versions compared by line."""
    report = _report(request, id)
    new = selectors.version_get(report=report, number=wanted.to_version)
    old = selectors.version_get(report=report, number=wanted.from_version or max(1, new.number - 1))
    added, removed = differences.changed_lines(old.text, new.text)
    names = (f"version {old.number}", f"version {new.number}")
    return {
        "from_version": old.number,
        "to_version": new.number,
        "added": added,
        "removed": removed,
        "diff": differences.unified(old.text, new.text, *names),
    }


@router.get(
    "/{int:id}/comments",
    response=list[CommentOut],
    auth=require_scope("read"),
    summary="List comments",
)
@paginated(name="report-comments", serialize=selectors.serialize_comment)
def comment_list(request: HttpRequest, id: int) -> Any:
    """Comments and answers, oldest first."""
    return selectors.comments_of(report=_report(request, id))


@router.post(
    "/{int:id}/comments",
    response={201: CommentOut},
    auth=require_scope("runs"),
    summary="Comment on a report",
)
@creates(CommentOut)
def comment_create(request: HttpRequest, id: int, body: NewComment) -> Any:
    """Adds a comment, or an answer, which reopens a resolved comment."""
    report, parent = _report(request, id), None
    if body.parent is not None:
        parent = selectors.comment_get(report=report, id=body.parent)
    comment = comments.comment_create(
        report=report, by=user(request), text=body.text, parent=parent
    )
    return selectors.serialize_comment(comment)


@router.patch(
    "/{int:id}/comments/{int:comment}",
    response=CommentOut,
    auth=require_scope("runs"),
    summary="Resolve a comment",
)
def comment_change(request: HttpRequest, id: int, comment: int, body: CommentChange) -> Any:
    """Resolves or reopens a comment with its answers."""
    row = selectors.comment_get(report=_report(request, id), id=comment)
    changed = comments.comment_resolve(comment=row, by=user(request), resolved=body.resolved)
    return selectors.serialize_comment(changed)


@router.delete(
    "/{int:id}/comments/{int:comment}",
    response={204: None},
    auth=require_scope("runs"),
    summary="Delete a comment",
)
def comment_delete(request: HttpRequest, id: int, comment: int) -> HttpResponse:
    """Deletes a comment with its answers."""
    row = selectors.comment_get(report=_report(request, id), id=comment)
    comments.comment_delete(comment=row, by=user(request))
    return HttpResponse(status=204)


@router.get(
    "/{int:id}/links",
    response=list[LinkOut],
    auth=require_scope("read"),
    summary="List share links",
)
@paginated(name="report-links", newest_first=True, key=lambda row: int(row["id"]))
def link_list(request: HttpRequest, id: int) -> Any:
    """All share links, newest first; the path of your own ones."""
    by = user(request)
    rows = selectors.links_of(report=_report(request, id))
    return [share_links.serialize_link(link, by) for link in rows]


@router.post(
    "/{int:id}/links", response={201: LinkOut}, auth=require_scope("runs"), summary="Share"
)
@creates(LinkOut, secret=True)
def link_create(request: HttpRequest, id: int, body: NewLink) -> Any:
    """Creates a link that shows the newest version without a login, until it expires."""
    by = user(request)
    link = share_links.link_create(
        report=_report(request, id), by=by, expires=aware(body.expires), note=body.note
    )
    return share_links.serialize_link(link, by)


@router.delete(
    "/{int:id}/links/{int:link}",
    response={204: None},
    auth=require_scope("runs"),
    summary="Revoke a share link",
)
def link_revoke(request: HttpRequest, id: int, link: int) -> HttpResponse:
    """Ends a link at once."""
    row = selectors.link_get(report=_report(request, id), id=link)
    share_links.link_revoke(link=row, by=user(request))
    return HttpResponse(status=204)


def _report(request: HttpRequest, id: int) -> Any:
    return selectors.report_get(user=user(request), id=min(id, MAX_ID))


def _full(report: Any) -> dict[str, Any]:
    version = selectors.version_get(report=report)
    return {
        **selectors.serialize_report(report),
        "text": version.text,
        "author": version.author.username,
        "note": version.note,
    }
