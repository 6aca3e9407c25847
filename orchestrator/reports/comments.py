"""Writes comments: a comment has answers, and is resolved and reopened."""

from __future__ import annotations

from typing import Any, Final

from django.db import transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import clock, conditional
from orchestrator.common.errors import conflict, forbidden, invalid
from orchestrator.reports import selectors, services
from orchestrator.reports.models import Report, ReportComment

MOST_TEXT: Final = 10_000
MOST: Final = 1000  # of a report


def comment_create(
    *, report: Report, by: User, text: str, parent: ReportComment | None = None
) -> ReportComment:
    """Comment on a report, or answer a comment. Raises 403, 409 above the limit, 422."""
    services.require_edit(report, by)
    text = text.replace("\r\n", "\n").replace("\x00", "\ufffd").strip()
    if not 1 <= len(text) <= MOST_TEXT:
        raise invalid(
            "text", f"a comment has 1 to {MOST_TEXT:,} characters", "Write what you think."
        )
    if parent is not None and parent.parent_id is not None:
        raise invalid("parent", "an answer has no answers", "Answer the first comment.")
    if report.comments.count() >= MOST:
        raise conflict(f"The report has {MOST:,} comments. Delete some first.")
    with transaction.atomic():
        comment = ReportComment.objects.create(
            report=report,
            parent=parent,
            author=by,
            version=report.head,
            text=text,
            created=clock.now(),
        )
        _audit(comment, by, "create")
        if parent is not None and parent.resolved is not None:  # an answer reopens its comment
            _set_resolved(parent, by, resolved=False)
    return comment


def comment_resolve(*, comment: ReportComment, by: User, resolved: bool) -> ReportComment:
    """Resolve or reopen a comment with its answers. Raises 403, 422 for an answer."""
    services.require_edit(comment.report, by)
    if comment.parent_id is not None:
        raise invalid(
            "resolved", "an answer is resolved with its comment", "Answer the first comment."
        )
    with transaction.atomic():
        _set_resolved(comment, by, resolved=resolved)
    comment.refresh_from_db()
    return comment


def may_delete(comment: ReportComment, user: User) -> bool:
    """Whether the user may delete it: its author, and those who may delete the report."""
    own = comment.author_id == user.pk and selectors.may_edit(comment.report, user)
    return own or services.may_delete(comment.report, user)


def comment_delete(*, comment: ReportComment, by: User) -> None:
    """Delete a comment with its answers. Raises 403."""
    if not may_delete(comment, by):
        raise forbidden(
            f"The comment is by {comment.author.username}, who can delete it, as can the owner of "
            "the report."
        )
    with transaction.atomic():
        _audit(comment, by, "delete")
        comment.delete()


def _set_resolved(comment: ReportComment, by: User, *, resolved: bool) -> None:
    rows = ReportComment.objects.filter(pk=comment.pk, resolved__isnull=resolved)
    values: dict[str, Any] = {"resolved": None, "resolved_by": None}
    if resolved:
        values = {"resolved": clock.now(), "resolved_by": by}
    if conditional.update(rows, **values):
        _audit(comment, by, "resolve" if resolved else "reopen")


def _audit(comment: ReportComment, by: User, action: str) -> None:
    accounts.audit(
        actor=by,
        action=f"report_comment.{action}",
        target=f"report:{comment.report_id}",
        data={"comment": comment.pk},
    )
