"""Reads reviews, lines with their decisions and reviewed files that the user may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from django.db.models import Count, Max, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id
from orchestrator.reviews import source
from orchestrator.reviews.models import Claim, LineChange, LineReview, Review, ReviewedFile

Show = Literal["all", "undecided", "keep", "drop", "swap", "edited"]
SHOW: Final = ("all", "undecided", "keep", "drop", "swap", "edited")


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it now is: `original` is set if it was edited. `version` 0: it is unchanged."""

    line: int
    content: dict[str, Any]
    original: dict[str, Any] | None
    version: int
    decision: str
    rating: int | None
    note: str
    by: str
    time: datetime | None


def reviews_visible_to(*, user: User) -> QuerySet[Review]:
    """Reviews of the user and of team members, without their indexes."""
    rows = Review.objects.select_related("owner").defer("index")
    owners = people.visible_owners(user)
    return rows if owners is None else rows.filter(owner_id__in=owners)


def review_get(*, user: User, id: int | str) -> Review:
    """The review with this id. Raises 404."""
    row = reviews_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("review", id)
    return row


def counts(*, review: Review) -> dict[str, int]:
    """Lines by decision, undecided ones under "undecided", and edited ones."""
    rows = dict(
        LineReview.objects.filter(review=review)
        .exclude(decision="")
        .order_by()
        .values_list("decision")
        .annotate(Count("pk"))
    )
    decided = {name: rows.get(name, 0) for name in ("keep", "drop", "swap")}
    edited = LineReview.objects.filter(review=review, edited__isnull=False).count()
    return {**decided, "undecided": review.lines - sum(decided.values()), "edited": edited}


def reviewers(*, review: Review) -> list[dict[str, Any]]:
    """`{by, changes, newest}` of everybody who changed lines, the busiest first."""
    rows = LineChange.objects.filter(review=review).order_by().values("by")
    rows = rows.annotate(changes=Count("pk"), newest=Max("time")).order_by("-changes", "by")
    return [dict(row) for row in rows]


def line_get(*, review: Review, line: int) -> Line:
    """One line. Raises 404."""
    rows = lines_of(review=review, numbers=[line])
    if not rows:
        raise missing_object("line", f"{line} of {review.lines} in review {review.pk}")
    return rows[0]


def lines_of(*, review: Review, numbers: Sequence[int]) -> list[Line]:
    """The lines with these numbers, in this order; unknown ones are left out."""
    originals = source.read_lines(review, numbers)
    decided = LineReview.objects.filter(review=review, line__in=list(numbers))
    reviews = {row.line: row for row in decided}
    return [
        _line(number, originals[number], reviews.get(number))
        for number in numbers
        if number in originals
    ]


def numbers_from(*, review: Review, start: int, limit: int, show: Show) -> list[int]:
    """Numbers of at most `limit` lines from `start` on with this decision."""
    if show == "all":
        return list(range(start, min(review.lines, start + limit - 1) + 1))
    rows = LineReview.objects.filter(review=review, line__gte=start).order_by("line")
    if show == "undecided":
        return _undecided(review, start, limit)
    rows = rows.filter(edited__isnull=False) if show == "edited" else rows.filter(decision=show)
    return list(rows.values_list("line", flat=True)[:limit])


def next_line(*, review: Review, user: User, after: int) -> int | None:
    """The first undecided line after this one that no other person is looking at; after the
    last, from the beginning.
    """
    claims = Claim.objects.filter(review=review, until__gt=clock.now())
    busy = set(claims.exclude(by=user.username).values_list("line", flat=True))
    for start in (after + 1, 1):
        for number in _undecided(review, start, len(busy) + 1):
            if number not in busy:
                return number
    return None


def changes_of(*, review: Review, line: int) -> QuerySet[LineChange]:
    """All changes of a line, oldest first."""
    return LineChange.objects.filter(review=review, line=line).order_by("version")


def reviewed_files_of(*, review: Review) -> QuerySet[ReviewedFile]:
    """The files that this review's decisions were written to, newest first."""
    return ReviewedFile.objects.filter(review=review).order_by("-id")


def serialize_review(review: Review) -> dict[str, Any]:
    """The review as REST shows it."""
    return {
        "id": review.pk,
        "name": review.name,
        "owner": review.owner.username,
        "created": review.created,
        "source": review.source,
        "run": review.run,
        "format": review.format,
        "lines": review.lines,
        "sha256": review.sha256,
        "counts": counts(review=review),
        "reviewers": reviewers(review=review),
    }


def _undecided(review: Review, start: int, limit: int) -> list[int]:
    """The first numbers from `start` on without a decision."""
    decided = (
        LineReview.objects.filter(review=review, line__gte=start)
        .exclude(decision="")
        .order_by("line")
        .values_list("line", flat=True)
    )
    numbers: list[int] = []
    expected = start
    for line in decided.iterator(chunk_size=2000):
        numbers += range(expected, min(line, expected + limit - len(numbers)))
        if len(numbers) >= limit:
            return numbers[:limit]
        expected = line + 1
    numbers += range(expected, min(review.lines, expected + limit - len(numbers) - 1) + 1)
    return numbers[:limit]


def _line(number: int, original: dict[str, Any], row: LineReview | None) -> Line:
    edited = row.edited if row is not None else None
    return Line(
        line=number,
        content=edited if edited is not None else original,
        original=original if edited is not None else None,
        version=row.version if row is not None else 0,
        decision=row.decision if row is not None else "",
        rating=row.rating if row is not None else None,
        note=row.note if row is not None else "",
        by=row.by if row is not None else "",
        time=row.time if row is not None else None,
    )
