"""Reads reports, versions, comments and share links that a user may see."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, Q, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import TeamMembership, User
from orchestrator.accounts.roles import Role, at_least
from orchestrator.common import clock
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id
from orchestrator.reports.models import Report, ReportComment, ReportVersion, ShareLink

_WRITERS = (Role.SUBMITTER, Role.OPERATOR, Role.ADMIN)


def reports_visible_to(*, user: User, q: str = "") -> QuerySet[Report]:
    """Reports of the user and of team members, with `open_comments`."""
    rows = Report.objects.select_related("owner")
    owners = people.visible_owners(user)
    if owners is not None:
        rows = rows.filter(owner_id__in=owners)
    if q:
        rows = rows.filter(Q(title__icontains=q) | Q(owner__username__icontains=q))
    unresolved = Q(comments__parent=None, comments__resolved=None, comments__isnull=False)
    return rows.annotate(open_comments=Count("comments", filter=unresolved))


def report_get(*, user: User, id: int | str) -> Report:
    """The report with this id. Raises 404."""
    row = reports_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("report", id)
    return row


def may_write(user: User) -> bool:
    """Whether the user may create reports."""
    return bool(user.is_superuser) or at_least(user.role, Role.SUBMITTER)


def may_edit(report: Report, user: User) -> bool:
    """Whether the user may edit and comment: submitters their own and those of their teams.

    In a team, the role in that team applies.
    """
    if people.sees_everyone(user):
        return True
    if not may_write(user):
        return False
    if report.owner_id == user.pk:
        return True
    own = TeamMembership.objects.filter(user=user, role__in=_WRITERS).values("team")
    return TeamMembership.objects.filter(team__in=own, user=report.owner_id).exists()


def versions_of(*, report: Report) -> QuerySet[ReportVersion]:
    """All versions, newest first."""
    rows = ReportVersion.objects.filter(report=report)
    return rows.select_related("author").order_by("-number")


def version_get(*, report: Report, number: int | str | None = None) -> ReportVersion:
    """A version; the newest without a number. Raises 404."""
    which = report.head if number is None else number
    row = None
    if is_id(which) and int(which) < 2**31:
        row = versions_of(report=report).filter(number=int(which)).first()
    if row is None:
        raise missing_object("version", f"{which} of report {report.pk}")
    return row


@dataclass(frozen=True, slots=True)
class Thread:
    """A comment with its answers, oldest first."""

    comment: ReportComment
    answers: list[ReportComment] = field(default_factory=list)


def comments_of(*, report: Report) -> QuerySet[ReportComment]:
    """All comments and answers, oldest first."""
    rows = ReportComment.objects.filter(report=report).order_by("pk")
    return rows.select_related("author", "resolved_by")


def threads_of(*, report: Report) -> list[Thread]:
    """The comments with their answers: open ones first, then resolved ones; oldest first."""
    by_id: dict[int, Thread] = {}
    for comment in comments_of(report=report):
        if comment.parent_id is None:
            by_id[comment.pk] = Thread(comment)
        elif comment.parent_id in by_id:
            by_id[comment.parent_id].answers.append(comment)
    return sorted(by_id.values(), key=lambda thread: thread.comment.resolved is not None)


def comment_get(*, report: Report, id: int | str) -> ReportComment:
    """A comment of the report. Raises 404."""
    row = comments_of(report=report).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("comment", f"{id} of report {report.pk}")
    return row


def links_of(*, report: Report) -> QuerySet[ShareLink]:
    """All share links, newest first."""
    return ShareLink.objects.filter(report=report).select_related("author").order_by("-pk")


def link_get(*, report: Report, id: int | str) -> ShareLink:
    """A share link of the report. Raises 404."""
    row = links_of(report=report).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("share link", f"{id} of report {report.pk}")
    return row


def link_state(link: ShareLink) -> str:
    """`active`, `expired`, `revoked`, or `disabled`: its author may no longer see the report."""
    if link.revoked is not None:
        return "revoked"
    if link.expires <= clock.now():
        return "expired"
    author = link.author
    if not author.is_active:
        return "disabled"
    owners = people.visible_owners(author)
    if owners is not None and link.report.owner_id not in owners:
        return "disabled"
    return "active"


def serialize_report(report: Report) -> dict[str, Any]:
    """The report as REST lists it, without its text."""
    return {
        "id": report.pk,
        "title": report.title,
        "owner": report.owner.username,
        "version": report.head,
        "created": report.created,
        "updated": report.updated,
        "open_comments": getattr(report, "open_comments", 0),
    }


def serialize_version(version: ReportVersion) -> dict[str, Any]:
    """A version with its text."""
    return {**serialize_version_row(version), "text": version.text}


def serialize_version_row(version: ReportVersion) -> dict[str, Any]:
    """A version without its text."""
    return {
        "version": version.number,
        "title": version.title,
        "note": version.note,
        "author": version.author.username,
        "restored": version.restored,
        "created": version.created,
    }


def serialize_comment(comment: ReportComment) -> dict[str, Any]:
    """A comment or an answer."""
    return {
        "id": comment.pk,
        "parent": None if comment.parent_id is None else str(comment.parent_id),
        "author": comment.author.username,
        "version": comment.version,
        "text": comment.text,
        "created": comment.created,
        "resolved": comment.resolved,
        "resolved_by": comment.resolved_by.username if comment.resolved_by else None,
    }
