"""Reviews: people keep, drop, rate and edit lines, and write the result to a reviewed file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from django.http import FileResponse, HttpRequest, HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import Page, paginated
from orchestrator.api.http.problems import invalid
from orchestrator.api.schemas.base import Id, PageOf, Time
from orchestrator.reviews import reviewed_files, selectors, services
from workers.contracts.base import Contract
from workers.contracts.specs.data import ExampleFormat

router = Router(tags=["data"])
LOCATION = "/api/v1/reviews/{id}"
_Line = Annotated[int, Field(ge=1, le=2**31 - 1)]


class NewReview(Contract):
    """A file of the data folders, or a produce run whose accepted lines are reviewed."""

    name: Annotated[str, Field(max_length=160, description="default: the file's name")] = ""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    run: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    format: Annotated[ExampleFormat | None, Field(description="default: by the first line")] = None


class Reviewer(Schema):
    """A person who changed lines."""

    by: str
    changes: int
    newest: Time


class ReviewOut(Schema):
    """A copy of a file that people decide about."""

    id: Id
    name: str
    owner: str
    created: Time
    source: str
    run: int | None
    format: str
    lines: int
    sha256: str
    counts: dict[str, int] = Field(
        description="lines by decision: keep, drop, swap, undecided; and edited ones"
    )
    reviewers: list[Reviewer]


class LineOut(Schema):
    """A line as it now is."""

    line: int
    content: dict[str, Any]
    original: dict[str, Any] | None = Field(description="before the edit; null without one")
    version: int = Field(description="0: unchanged; send it with a change")
    decision: str = Field(description='"", keep, drop, or swap: of a pair, rejected is better')
    rating: int | None
    note: str
    by: str
    time: Time | None


class LineEdit(Contract):
    """The change of a line; omitted fields keep their values."""

    version: Annotated[int, Field(ge=0, le=2**31 - 1, description="of the line as you saw it")]
    decision: Literal["", "keep", "drop", "swap"] | None = None
    rating: Annotated[int | None, Field(description="1 to 5; null takes it back")] = None
    content: Annotated[
        dict[str, Any] | None, Field(description="the new line; null takes the edit back")
    ] = None
    note: Annotated[str, Field(max_length=2000)] | None = None


class ChangeOut(Schema):
    """One version of a line."""

    version: int
    by: str
    time: Time
    content: dict[str, Any] = Field(description="decision, rating, edited, note")


class LinesWanted(Contract):
    """Which lines."""

    show: Literal["all", "undecided", "keep", "drop", "swap", "edited"] = "all"


class NextWanted(Contract):
    """Where to look."""

    after: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


class NextOut(Schema):
    """The next line to decide; null if all are decided, or others look at the rest."""

    line: int | None


class NewReviewedFile(Contract):
    """What is written."""

    writes: Annotated[
        Literal["lines", "edits_as_pairs"],
        Field(description="edits_as_pairs: the edited answer as chosen, the original as rejected"),
    ] = "lines"
    undecided: Literal["keep", "drop"] = "drop"
    min_rating: Annotated[int, Field(ge=1, le=5)] | None = None


class ReviewedFileOut(Schema):
    """A file with the decisions, each line with its review, line, version, person and time."""

    id: Id
    path: str = Field(description="for data.path of a run")
    format: str
    lines: int
    bytes: int
    sha256: str
    by: str
    created: Time
    options: dict[str, Any]


@router.get("", response=list[ReviewOut], auth=require_scope("read"), summary="List reviews")
@paginated(name="reviews", newest_first=True, serialize=selectors.serialize_review)
def review_list(request: HttpRequest) -> Any:
    """Reviews that you may see, newest first."""
    return selectors.reviews_visible_to(user=user(request)).order_by("-pk")


@router.post("", response={201: ReviewOut}, auth=require_scope("runs"), summary="Begin a review")
@creates(ReviewOut, location=LOCATION)
def review_create(request: HttpRequest, body: NewReview) -> Any:
    """Copies the file; 422 names the first line that is not an example."""
    review = services.review_create(
        by=user(request), name=body.name, path=body.path, run=body.run, format=body.format
    )
    return selectors.serialize_review(review)


@router.get("/{int:id}", response=ReviewOut, auth=require_scope("read"), summary="Get a review")
def review(request: HttpRequest, id: int) -> Any:
    """One review with its counts and reviewers."""
    return selectors.serialize_review(_review(request, id))


@router.delete(
    "/{int:id}", response={204: None}, auth=require_scope("runs"), summary="Delete a review"
)
def review_remove(request: HttpRequest, id: int) -> HttpResponse:
    """Deletes the copy and all decisions; reviewed files stay."""
    services.review_delete(review=_review(request, id), by=user(request))
    return HttpResponse(status=204)


@router.get(
    "/{int:id}/lines",
    response=PageOf[LineOut],
    auth=require_scope("read"),
    summary="List reviewed lines",
)
def lines(request: HttpRequest, id: int, page: Page, wanted: Query[LinesWanted]) -> Any:
    """Lines as they now are, in the file's order; the cursor is the next line's number."""
    row = _review(request, id)
    cursor = page.cursor or "1"
    if not (cursor.isascii() and cursor.isdecimal() and int(cursor[:10]) > 0 and len(cursor) < 10):
        raise invalid(
            "cursor",
            f"{cursor!r} is not a line's number",
            "Use the next_cursor of the previous page.",
        )
    numbers = selectors.numbers_from(
        review=row, start=int(cursor), limit=page.limit + 1, show=wanted.show
    )
    following = str(numbers[page.limit]) if len(numbers) > page.limit else None
    listed = selectors.lines_of(review=row, numbers=numbers[: page.limit])
    return {"items": [asdict(line) for line in listed], "next_cursor": following}


@router.get(
    "/{int:id}/lines/{int:line}",
    response=LineOut,
    auth=require_scope("read"),
    summary="Get a reviewed line",
)
def line_detail(request: HttpRequest, id: int, line: int) -> Any:
    """One line as it now is."""
    return asdict(selectors.line_get(review=_review(request, id), line=line))


@router.patch(
    "/{int:id}/lines/{int:line}",
    response=LineOut,
    auth=require_scope("runs"),
    summary="Decide about a line",
)
def line_change(request: HttpRequest, id: int, line: int, body: LineEdit) -> Any:
    """Changes decision, rating, content or note. 409 if the line was changed since you saw
    it: nothing is overwritten.
    """
    given = body.model_fields_set
    fields = {
        name: getattr(body, name)
        for name in ("decision", "rating", "content", "note")
        if name in given and (name in ("rating", "content") or getattr(body, name) is not None)
    }
    changed = services.line_change(
        review=_review(request, id),
        line=line,
        version=body.version,
        by=user(request),
        edit=services.LineEdit(**fields),
    )
    return asdict(changed)


@router.get(
    "/{int:id}/lines/{int:line}/changes",
    response=list[ChangeOut],
    auth=require_scope("read"),
    summary="List changes of a line",
)
@paginated(
    name="line-changes",
    key=lambda row: int(row.version),
    serialize=lambda row: {
        "version": row.version,
        "by": row.by,
        "time": row.time,
        "content": row.content,
    },
)
def line_changes(request: HttpRequest, id: int, line: int) -> Any:
    """Who changed the line, when, and to what, oldest first."""
    return list(selectors.changes_of(review=_review(request, id), line=line)[:1000])


@router.post(
    "/{int:id}/next", response=NextOut, auth=require_scope("runs"), summary="Claim the next line"
)
def next_line(request: HttpRequest, id: int, body: NextWanted) -> Any:
    """The next undecided line that no other person is looking at; it is yours for 5 minutes."""
    row = _review(request, id)
    number = selectors.next_line(review=row, user=user(request), after=body.after)
    if number is not None:
        services.line_claim(review=row, line=number, by=user(request))
    return {"line": number}


@router.get(
    "/{int:id}/data-sets",
    response=list[ReviewedFileOut],
    auth=require_scope("read"),
    summary="List reviewed files of a review",
)
@paginated(name="data-sets", newest_first=True)
def reviewed_file_list(request: HttpRequest, id: int) -> Any:
    """The files that the decisions were written to, newest first."""
    return selectors.reviewed_files_of(review=_review(request, id))


@router.post(
    "/{int:id}/data-sets",
    response={201: ReviewedFileOut},
    auth=require_scope("runs"),
    summary="Write a reviewed file",
)
@creates(ReviewedFileOut)
def reviewed_file_create(request: HttpRequest, id: int, body: NewReviewedFile) -> Any:
    """Writes the kept lines, or edits as preference pairs, to a new file that runs can read."""
    return reviewed_files.review_write(
        review=_review(request, id),
        by=user(request),
        writes=body.writes,
        undecided=body.undecided,
        min_rating=body.min_rating,
    )


@router.get(
    "/{int:id}/data-sets/{int:data_set}/download",
    auth=require_scope("read"),
    summary="Download a reviewed file",
    openapi_extra={"responses": {200: {"content": {"application/x-ndjson": {}}}}},
)
def reviewed_file_download(request: HttpRequest, id: int, data_set: int) -> FileResponse:
    """The file's lines. 409 if it is on another machine."""
    path = reviewed_files.file_of(review=_review(request, id), id=data_set)
    return FileResponse(open(path, "rb"), as_attachment=True, filename=path.name)


def _review(request: HttpRequest, id: int) -> Any:
    return selectors.review_get(user=user(request), id=id)
