"""What a run did and left behind: attempts, events, checkpoints, artifacts, log lines.

Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Query, Router
from pydantic import Field

from orchestrator.api.http.auth import needs
from orchestrator.api.http.lookup import LARGEST, run_of
from orchestrator.api.http.pagination import Page, after, paged, paged_whole
from orchestrator.api.http.problems import invalid, not_found, refuse
from orchestrator.api.http.responses import streamed
from orchestrator.api.schemas import (
    ArtifactOut,
    AttemptOut,
    CheckpointOut,
    EventOut,
    LogLine,
    PageOf,
    SamplesOut,
)
from orchestrator.runs import selectors
from orchestrator.runs.outputs.text_samples import samples_of
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.base import Contract

router = Router(tags=["runs"])
_PIECE = 1 << 18


class Lines(Contract):
    rank: Annotated[int | None, Field(ge=-1, description="-1: the supervisor's own lines")] = None
    q: Annotated[str | None, Field(max_length=200, description="only lines that contain it")] = None
    after: Annotated[
        str | None, Field(max_length=60, description="`cursor` or seq of the last line one has")
    ] = None


@router.get(
    "/{int:id}/attempts",
    response=PageOf[AttemptOut],
    auth=needs("read"),
    summary="Tries, oldest first",
)
def attempts(request: HttpRequest, id: int, page: Page) -> dict[str, Any]:
    rows = sorted(
        selectors.attempts_of(run=run_of(request, id)), key=lambda attempt: attempt.number
    )
    return paged_whole(
        rows, page, "attempts", lambda attempt: attempt.number, selectors.attempt_answer
    )


@router.get(
    "/{int:id}/events",
    response=PageOf[EventOut],
    auth=needs("read"),
    summary="What happened, oldest first",
)
def events(
    request: HttpRequest, id: int, page: Page, type: str | None = None, after_seq: int = 0
) -> dict[str, Any]:
    """`type` takes one event type or several with commas between; `after_seq` starts behind an
    event's `seq`.
    """
    rows = selectors.events_of(
        run=run_of(request, id),
        after=after(page, "events") or min(after_seq, LARGEST),
        limit=page.limit + 1,
        types=type.split(",") if type else None,
    )
    return paged(list(rows), page, "events", lambda event: event.seq, selectors.event_answer)


@router.get(
    "/{int:id}/checkpoints",
    response=PageOf[CheckpointOut],
    auth=needs("read"),
    summary="Saved states",
)
def checkpoints(request: HttpRequest, id: int, page: Page) -> dict[str, Any]:
    rows = sorted(
        selectors.checkpoints_of(run=run_of(request, id)), key=lambda checkpoint: checkpoint.pk
    )
    return paged_whole(
        rows, page, "checkpoints", lambda checkpoint: checkpoint.pk, selectors.checkpoint_answer
    )


@router.get(
    "/{int:id}/artifacts", response=PageOf[ArtifactOut], auth=needs("read"), summary="Files it left"
)
def artifacts(request: HttpRequest, id: int, page: Page) -> dict[str, Any]:
    rows = sorted(selectors.artifacts_of(run=run_of(request, id)), key=lambda artifact: artifact.pk)
    return paged_whole(
        rows, page, "artifacts", lambda artifact: artifact.pk, selectors.artifact_answer
    )


@router.get(
    "/{int:id}/samples",
    response=PageOf[SamplesOut],
    auth=needs("read"),
    summary="What its model wrote",
)
def samples(request: HttpRequest, id: int, page: Page) -> dict[str, Any]:
    """Texts after the same prompts, by step: those of the newest attempt, and of what no rewind
    gave up.
    """
    rows = samples_of(run=run_of(request, id))
    return paged_whole(
        rows,
        page,
        "samples",
        lambda row: row.told.step,
        lambda row: {**dict(row.told), "attempt": row.attempt, "time": row.time},
    )


@router.get(
    "/{int:id}/artifacts/{int:artifact}/download",
    auth=needs("read"),
    summary="One of its files",
    openapi_extra={"responses": {200: {"content": {"application/octet-stream": {}}}}},
)
def artifact_download(request: HttpRequest, id: int, artifact: int) -> HttpResponseBase:
    found = next(
        (item for item in selectors.artifacts_of(run=run_of(request, id)) if item.pk == artifact),
        None,
    )
    if found is None:
        raise not_found("artifact", artifact, f"/api/v1/runs/{id}/artifacts")
    root = Path(settings.ENV.media_runs).resolve()
    path = (root.parent / found.path).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise refuse(
            "file-elsewhere",
            "The file is not on this machine",
            409,
            f"{found.name} lies at {found.path} in the data directory of the node that wrote it. "
            "Fetch it there, or "
            "let the nodes share the run directory (ORRERY_SHARED_RUNS).",
        )
    response = streamed(request, _pieces(path), "application/octet-stream")
    response["Content-Length"] = str(path.stat().st_size)
    response["Content-Disposition"] = (
        content_disposition_header(True, Path(found.name).name) or "attachment"
    )
    return response


@router.get(
    "/{int:id}/logs",
    response=PageOf[LogLine],
    auth=needs("read"),
    summary="Log lines in order of arrival",
)
def logs(request: HttpRequest, id: int, page: Page, lines: Query[Lines]) -> dict[str, Any]:
    """To follow a log, ask again with `after` set to the `cursor` of the last line."""
    run = run_of(request, id)
    asked = page.cursor or lines.after or ""
    place, beyond = (None, min(int(asked), LARGEST)) if asked.isdecimal() else (asked or None, -1)
    found: list[Any] = []
    while len(found) <= page.limit:
        try:
            part = telemetry.logs(
                run=run, rank=lines.rank, q=lines.q, after=place, limit=page.limit + 1
            )
        except ValueError as error:
            raise invalid("after", str(error), "the cursor of the last line you have") from None
        found += [line for line in part if line.seq > beyond]
        if len(part) <= page.limit or beyond < 0:
            break
        place = part[-1].cursor
    items = found[: page.limit]
    return {"items": items, "next_cursor": items[-1].cursor if len(found) > page.limit else None}


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
