"""Begins reviews and changes lines. Of two people who change a line at once, the second is refused.

Does not write reviewed files (`reviewed_files`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from django.conf import settings
from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts import teams
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock, conditional
from orchestrator.common.checked_files import open_resolved
from orchestrator.common.errors import Refusal, forbidden, invalid
from orchestrator.reviews import selectors, source
from orchestrator.reviews.models import Claim, LineChange, LineReview, Review
from orchestrator.reviews.selectors import Line
from orchestrator.runs import selectors as runs
from orchestrator.runs.outputs import produced_lines
from orchestrator.runs.submission.data_paths import file_problems, resolve_path
from orchestrator.runs.submission.run_paths import run_of_path
from workers.contracts.specs.data import ExampleFormat

CLAIM: Final = timedelta(minutes=5)
NAME_LENGTH: Final = 160
PAIRS: Final = "preference"


class _Unset:
    """A field that a change leaves alone."""


UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True)
class LineEdit:
    """The fields of a line that a person changes; `content` None takes an edit back."""

    decision: str | _Unset = UNSET
    rating: int | _Unset | None = UNSET
    content: dict[str, Any] | _Unset | None = UNSET
    note: str | _Unset = UNSET


def review_create(
    *,
    by: User,
    name: str = "",
    path: str | None = None,
    run: int | None = None,
    format: ExampleFormat | None = None,
) -> Review:
    """Copy a file of the data folders, or the lines that a produce run has accepted so far.

    Raises 403 for viewers, 404 for a hidden run, 409 if the run's lines are on another machine, 422
    for a file that is not of examples.
    """
    accounts.require_role(by, Role.SUBMITTER, "begin reviews")
    if len(name.strip()) > NAME_LENGTH or not name.strip().isprintable():
        raise invalid(
            "name", f"a name has 1 to {NAME_LENGTH} printable characters", "Use a short name."
        )
    file, opened, of_run = _source(by, path, run)
    name = name.strip() or file.name[:NAME_LENGTH]
    # named by the process until the row exists
    target = source.folder() / f".new-{os.getpid()}-{os.urandom(6).hex()}"
    copied = source.copy(file, opened, target, format=format)
    try:
        with transaction.atomic():
            review = Review.objects.create(
                name=name,
                owner=by,
                created=clock.now(),
                source=str(file),
                run=of_run,
                format=copied.format,
                lines=copied.lines,
                sha256=copied.sha256,
                index=copied.index,
            )
            os.replace(target, source.path_of(review))
            data = {"source": str(file), "lines": copied.lines}
            accounts.audit(
                actor=by, action="review.create", target=f"review:{review.pk}", data=data
            )
    finally:
        target.unlink(missing_ok=True)
    return review


def line_change(*, review: Review, line: int, version: int, by: User, edit: LineEdit) -> Line:
    """Change a line whose `version` the person saw (0: it was unchanged).

    Raises 403 for viewers, 404, 422, and 409 `line-changed` if it was changed meanwhile.
    """
    accounts.require_role(by, Role.SUBMITTER, "review lines")
    current = selectors.line_get(review=review, line=line)
    _check(review, edit)
    edited = current.content if current.original is not None else None
    fields: dict[str, Any] = {
        "decision": _chosen(edit.decision, current.decision),
        "rating": _chosen(edit.rating, current.rating),
        "edited": _chosen(edit.content, edited),
        "note": _chosen(edit.note, current.note),
    }
    now = clock.now()
    values = {**fields, "by": by.username, "time": now}
    try:
        with transaction.atomic():
            row = LineReview.objects.filter(review=review, line=line, version=version)
            if version == 0:
                LineReview.objects.create(review=review, line=line, version=1, **values)
            elif not conditional.update(row, version=version + 1, **values):
                raise _changed(review, line)
            LineChange.objects.create(
                review=review,
                line=line,
                version=version + 1,
                by=by.username,
                time=now,
                content=fields,
            )
    except IntegrityError:
        raise _changed(review, line) from None
    return selectors.line_get(review=review, line=line)


def line_claim(*, review: Review, line: int, by: User) -> None:
    """Note that the person looks at this line now, and no longer at another one."""
    Claim.objects.update_or_create(
        review=review, by=by.username, defaults={"line": line, "until": clock.now() + CLAIM}
    )


def may_delete(review: Review, user: User) -> bool:
    """Whether the user may delete it: its owner, operators, and those of a shared team."""
    return review.owner_id == user.pk or teams.manages(user, review.owner_id)


def review_delete(*, review: Review, by: User) -> None:
    """Delete a review with its copy and decisions; reviewed files stay. Raises 403."""
    if not may_delete(review, by):
        raise forbidden("Only the owner of a review and operators delete it.")
    path = source.path_of(review)
    data = {"name": review.name, "lines": review.lines}
    with transaction.atomic():
        accounts.audit(actor=by, action="review.delete", target=f"review:{review.pk}", data=data)
        review.delete()
    path.unlink(missing_ok=True)


def _source(by: User, path: str | None, run: int | None) -> tuple[Path, BinaryIO, int | None]:
    """The file's path, the opened file, and its run."""
    if (path is None) == (run is None):
        raise invalid("path", "a review is of a file or of a run", "Use either path or run.")
    if run is not None:
        row = runs.run_get(user=by, id=run)
        if produced_lines.body_of(row) is None:
            raise invalid("run", f"run {row.pk} is a {row.kind} run", "Use a run of kind produce.")
        opened = produced_lines.open_lines(run=row)
        return produced_lines.file_path(run=row, which="accepted"), opened, row.pk
    roots = settings.DATA_ROOTS
    resolved, problems = resolve_path("path", str(path), roots)
    problems = problems or file_problems("path", str(path), "any", roots)
    if problems or resolved is None:
        raise Refusal("invalid", "The request is not valid", 422, str(problems[0]), problems)
    if not resolved.is_file():
        raise invalid("path", f"{path} is not a file", "Use one file.")
    of_run = run_of_path(resolved, settings.ENV.media_runs)
    if of_run is not None:
        runs.run_get(user=by, id=of_run)  # a data folder may link to runs
    try:
        return resolved, open_resolved(resolved), of_run
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise invalid("path", message, "Use a file that Orrery's user may read.") from None


def _check(review: Review, edit: LineEdit) -> None:
    allowed = ("", "keep", "drop", *(("swap",) if review.format == PAIRS else ()))
    if not isinstance(edit.decision, _Unset) and edit.decision not in allowed:
        listed = ", ".join(each or '""' for each in allowed)
        raise invalid("decision", f"{edit.decision!r} is not a decision", f"Use one of {listed}.")
    if isinstance(edit.rating, int) and not 1 <= edit.rating <= 5:
        raise invalid("rating", f"{edit.rating} is not from 1 to 5", "Use 1 to 5, or null.")
    if isinstance(edit.note, str) and len(edit.note) > 2000:
        raise invalid("note", "longer than 2,000 characters", "Use a shorter note.")
    if isinstance(edit.content, dict):
        format_: Any = review.format
        source.check_content(edit.content, format_)


def _chosen(value: Any, current: Any) -> Any:
    return current if isinstance(value, _Unset) else value


def _changed(review: Review, line: int) -> Refusal:
    row = LineReview.objects.filter(review=review, line=line).first()
    who = f"by {row.by} " if row is not None else ""
    return Refusal(
        "line-changed",
        "The line was changed meanwhile",
        409,
        f"Line {line} was changed {who}since you read it. Read it again, then repeat your change.",
    )
