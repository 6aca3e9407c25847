"""What a run's program records about itself: configuration, summary, origin, and media."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import MAX_ID, get_run
from orchestrator.api.http.pagination import paginated
from orchestrator.api.http.problems import refuse
from orchestrator.api.ingest import validate_items
from orchestrator.api.schemas.base import Id
from orchestrator.api.schemas.runs import IngestOut
from orchestrator.runs import services as runs
from orchestrator.tracking import media as rules
from orchestrator.tracking import selectors, services
from workers.contracts.base import Contract

router = Router(tags=["ingest"])
MOST_CHANGES = 1000
MOST_MEDIA = 200  # per request


class Program(Schema):
    """Where a program came from; every field is optional."""

    command: list[str] | None = None
    folder: str | None = None
    host: str | None = None
    python: str | None = None
    commit: str | None = None
    branch: str | None = None
    remote: str | None = None
    dirty: bool | None = Field(None, description="whether files differ from the commit")


class DetailsOut(Schema):
    """What the program recorded; empty objects and texts if it recorded nothing."""

    config: dict[str, Any]
    summary: dict[str, Any]
    program: Program
    diff: str
    requirements: str
    updated: str | None


class Change(Contract):
    """A change of the details; `config` and `summary` are merge patches (RFC 7396)."""

    config: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    program: Annotated[
        dict[str, Any] | None,
        Field(description="command, folder, host, python, commit, branch, remote, dirty"),
    ] = None
    diff: str | None = None
    requirements: Annotated[str | None, Field(description="one name==version per line")] = None


class Changes(Contract):
    """Changes of the details in their order; `seq`, `rank` and `time` of items are ignored."""

    details: Annotated[list[dict[str, Any]], Field(max_length=MOST_CHANGES)]


class MediaIn(Contract):
    """One image, histogram, text or table."""

    name: Annotated[str, Field(min_length=1, max_length=rules.LONGEST_NAME)]
    kind: Literal["image", "histogram", "text", "table"]
    step: Annotated[int, Field(ge=0, le=MAX_ID >> 1)] = 0
    index: Annotated[int, Field(ge=0, le=10_000, description="of several in one step")] = 0
    caption: Annotated[str, Field(max_length=500)] = ""
    time: Annotated[float | None, Field(ge=0, le=4e12)] = None
    data: Annotated[
        Any,
        Field(
            description="image: PNG or JPEG as base64; text: a text; histogram: {counts, edges}; "
            "table: {columns, rows}"
        ),
    ]


class MediaBatch(Contract):
    """Media to store."""

    media: Annotated[list[dict[str, Any]], Field(max_length=MOST_MEDIA)]


class ImageOut(Schema):
    """An image's file."""

    content_type: str
    width: int
    height: int
    bytes: int
    url: str


class MediaOut(Schema):
    """One media item; `data` is null for an image."""

    id: Id
    run: Id
    name: str
    kind: str
    step: int
    index: int
    caption: str
    time: float
    data: Any
    image: ImageOut | None


class MediaFilter(Contract):
    """Filters of the list of media."""

    name: Annotated[str, Field(max_length=rules.LONGEST_NAME)] = ""
    kind: Annotated[str, Field(max_length=10)] = ""
    step: int | None = None


@router.get(
    "/{int:id}/details",
    response=DetailsOut,
    auth=require_scope("read"),
    summary="Get what the program recorded",
)
def details(request: HttpRequest, id: int) -> Any:
    """Configuration, summary, git commit and diff, command line and requirements."""
    return selectors.serialize_details(selectors.details_of(run=get_run(request, id)))


@router.patch(
    "/{int:id}/details",
    response=DetailsOut,
    auth=require_scope("ingest"),
    summary="Change the details",
)
def details_change(request: HttpRequest, id: int, body: Change) -> Any:
    """Merges configuration and summary (null removes a name), and replaces the rest."""
    run = _managed(request, id)
    change = body.model_dump(exclude_none=False, exclude_unset=True)
    return selectors.serialize_details(services.details_update(run=run, changes=[change]))


@router.post(
    "/{int:id}/details",
    response=IngestOut,
    auth=require_scope("ingest"),
    summary="Change the details in several steps",
)
def details_append(request: HttpRequest, id: int, body: Changes) -> Any:
    """Applies up to 1,000 changes in their order. A repeated request changes nothing."""
    run = _managed(request, id)
    good, rejected = validate_items(
        body.details,
        lambda item: Change.model_validate(
            {name: item[name] for name in item if name not in ("seq", "rank", "time")}
        ),
    )
    changes = [change.model_dump(exclude_unset=True) for _, change in good]
    if changes:
        services.details_update(run=run, changes=changes)
    return {"accepted": len(changes), "duplicates": 0, "rejected": rejected}


@router.get(
    "/{int:id}/media", response=list[MediaOut], auth=require_scope("read"), summary="List media"
)
@paginated(name="media", serialize=selectors.serialize_media, size="bytes")
def media_list(request: HttpRequest, id: int, wanted: Query[MediaFilter]) -> Any:
    """The run's images, histograms, texts and tables, in the order of their arrival.

    A page ends early if its items are large.
    """
    return selectors.media_list(run=get_run(request, id), **wanted.model_dump())


@router.post(
    "/{int:id}/media", response=IngestOut, auth=require_scope("ingest"), summary="Store media"
)
def media_store(request: HttpRequest, id: int, body: MediaBatch) -> Any:
    """Stores up to 200 items. An item replaces the one of the same name, step and index."""
    run = _managed(request, id)
    now = time.time()

    def read(item: dict[str, Any]) -> Any:
        known = {name: item[name] for name in item if name not in ("seq", "rank")}
        values = MediaIn.model_validate(known).model_dump()
        return rules.check(**{**values, "time": now if values["time"] is None else values["time"]})

    good, rejected = validate_items(body.media, read)
    try:
        changed = services.media_store(run=run, items=[item for _, item in good])
    except ValueError as error:
        raise refuse("too-much-media", "Too much media", 422, f"{error}.") from None
    return {
        "accepted": sum(changed),
        "duplicates": len(changed) - sum(changed),
        "rejected": rejected,
    }


@router.get(
    "/{int:id}/media/{int:item}/file",
    auth=require_scope("read"),
    summary="Download an image",
    openapi_extra={
        "responses": {
            200: {
                "description": "a PNG or JPEG file",
                "content": {
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
                },
            }
        }
    },
)
def media_file(request: HttpRequest, id: int, item: int, v: str = "") -> HttpResponse:
    """The file of an image item. `v` only makes the address of each version of its own."""
    blob = selectors.media_blob(run=get_run(request, id), id=min(item, MAX_ID))
    response = HttpResponse(bytes(blob.data), content_type=blob.content_type)
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    if v:
        response["Cache-Control"] = "private, max-age=31536000, immutable"
    return response


def _managed(request: HttpRequest, id: int) -> Any:
    run, by = get_run(request, id), user(request)
    if not runs.may_manage(run, by):
        raise refuse(
            "not-yours",
            "The run belongs to another user",
            403,
            f"Run {id} belongs to {run.owner.get_username()}; its owner and operators may write to "
            "it. Record into a run that you own.",
        )
    if run.kind not in ("external", "script"):
        raise refuse(
            "not-external",
            "Orrery records this run itself",
            409,
            f"Run {id} is of kind {run.kind}: its spec is its configuration, and its node sends "
            "its results. Programs record into runs of kind external or script.",
        )
    return run
