"""A run's attempts, events, checkpoints, artifacts, samples and log lines. Reads only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from django.http import HttpRequest, HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Query, Router
from pydantic import Field

from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.lookup import MAX_ID, get_run
from orchestrator.api.http.pagination import Page, last_key, paginated
from orchestrator.api.http.problems import invalid, missing_object, refuse
from orchestrator.api.http.responses import stream_response
from orchestrator.api.schemas.base import PageOf
from orchestrator.api.schemas.runs import (
    ArtifactOut,
    AttemptOut,
    CheckpointOut,
    CodeOut,
    EventOut,
    LogLine,
    SamplesOut,
)
from orchestrator.runs import selectors
from orchestrator.runs.code import record
from orchestrator.runs.code.environment import environment_of
from orchestrator.runs.outputs.text_samples import samples_of
from orchestrator.runs.store import copies
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.base import Contract

router = Router(tags=["runs"])
_CHUNK = 1 << 18


class Lines(Contract):
    """Filters of log lines."""

    rank: Annotated[int | None, Field(ge=-1, description="-1: the supervisor's own lines")] = None
    q: Annotated[
        str | None, Field(max_length=200, description="only lines that contain this text")
    ] = None
    after: Annotated[
        str | None, Field(max_length=60, description="`cursor` or seq of the last line received")
    ] = None


@router.get(
    "/{int:id}/attempts",
    response=list[AttemptOut],
    auth=require_scope("read"),
    summary="List attempts",
)
@paginated(
    name="attempts",
    key=lambda row: row["attempt"],
    serialize=lambda row: row,
)
def attempts(request: HttpRequest, id: int) -> Any:
    """The run's attempts, oldest first."""
    _, rows = scheduling.device_time_of_run(get_run(request, id))
    return [
        selectors.serialize_attempt(attempt) | {"device_time": spent.to_dict() if spent else None}
        for attempt, spent in reversed(rows)
    ]


@router.get(
    "/{int:id}/events",
    response=list[EventOut],
    auth=require_scope("read"),
    summary="List events of a run",
)
@paginated(
    name="events",
    key=lambda event: event.seq,
    serialize=selectors.serialize_event,
    pass_parameter="page",
)
def events(
    request: HttpRequest, id: int, type: str | None = None, after_seq: int = 0, **paging: Any
) -> Any:
    """The run's events, oldest first.

    `type` takes one event type or a comma-separated list; `after_seq` skips events up to that
    `seq`.
    """
    page = paging["page"]
    return selectors.events_of(
        run=get_run(request, id),
        after=last_key(page, "events") or min(after_seq, MAX_ID),
        limit=page.limit + 1,
        types=type.split(",") if type else None,
    )


@router.get(
    "/{int:id}/checkpoints",
    response=list[CheckpointOut],
    auth=require_scope("read"),
    summary="List checkpoints",
)
@paginated(name="checkpoints", serialize=selectors.serialize_checkpoint)
def checkpoints(request: HttpRequest, id: int) -> Any:
    """The checkpoints that are still on disk, oldest first."""
    return selectors.checkpoints_of(run=get_run(request, id)).order_by("pk")


@router.get(
    "/{int:id}/code",
    response=CodeOut,
    auth=require_scope("read"),
    summary="Get the code of a script run",
)
def code_detail(request: HttpRequest, id: int) -> Any:
    """Commit, diff and files of the program at submission; `fingerprint` is null without code."""
    run = get_run(request, id)
    code, environment = record.code_of(run), environment_of(run)
    document = record.document(code) if code is not None else {}
    return {**document, "environment": environment.to_dict() if environment else None}


@router.get(
    "/{int:id}/artifacts",
    response=list[ArtifactOut],
    auth=require_scope("read"),
    summary="List artifacts",
)
@paginated(name="artifacts", serialize=selectors.serialize_artifact)
def artifacts(request: HttpRequest, id: int) -> Any:
    """The files that the run produced, oldest first."""
    return selectors.artifacts_of(run=get_run(request, id)).order_by("pk")


@router.get(
    "/{int:id}/samples",
    response=list[SamplesOut],
    auth=require_scope("read"),
    summary="List generated samples",
)
@paginated(
    name="samples",
    key=lambda row: row.content.step,
    serialize=lambda row: {**dict(row.content), "attempt": row.attempt, "time": row.time},
)
def samples(request: HttpRequest, id: int) -> Any:
    """Generated continuations of fixed prompts, by step, without steps that were discarded.

    A later attempt or a rewind discards the steps that it repeats.
    """
    return samples_of(run=get_run(request, id))


@router.get(
    "/{int:id}/artifacts/{int:artifact}/download",
    auth=require_scope("read"),
    summary="Download an artifact",
    openapi_extra={"responses": {200: {"content": {"application/octet-stream": {}}}}},
)
def artifact_download(request: HttpRequest, id: int, artifact: int) -> HttpResponseBase:
    """The artifact's bytes. 409 if the file is on another machine."""
    row = selectors.artifacts_of(run=get_run(request, id)).filter(pk=min(artifact, MAX_ID)).first()
    if row is None:
        raise missing_object("artifact", artifact, f"/api/v1/runs/{id}/artifacts")
    file = selectors.artifact_open(row)
    if file is None and (copy := copies.artifact_open(row)) is not None:
        return _attachment(request, row.name, *copy)
    if file is None:
        raise refuse(
            "file-elsewhere",
            "The file is not on this machine",
            409,
            f"{row.name} is at {row.path} in the data directory of the node that wrote it. Fetch "
            "it "
            "there, share the run directory between nodes (ORRERY_SHARED_RUNS), or let nodes copy "
            "artifacts into a store (ORRERY_STORE_URL).",
        )
    return _attachment(request, row.name, file, os.fstat(file.fileno()).st_size)


def _attachment(request: HttpRequest, name: str, file: BinaryIO, size: int) -> HttpResponseBase:
    response = stream_response(request, _chunks(file, size), "application/octet-stream")
    response["Content-Length"] = str(size)
    response["Content-Disposition"] = (
        content_disposition_header(True, Path(name).name) or "attachment"
    )
    return response


@router.get(
    "/{int:id}/logs",
    response=PageOf[LogLine],
    auth=require_scope("read"),
    summary="List log lines",
)
def logs(request: HttpRequest, id: int, page: Page, lines: Query[Lines]) -> dict[str, Any]:
    """Log lines in order of arrival.

    To follow a log, call again with `after` set to the `cursor` of the last line.
    """
    run = get_run(request, id)
    start = page.cursor or lines.after or ""
    by_seq = start.isdecimal()
    cursor, min_seq = (None, min(int(start), MAX_ID)) if by_seq else (start or None, -1)
    rows: list[Any] = []
    while len(rows) <= page.limit:
        try:
            batch = telemetry.logs(
                run=run, rank=lines.rank, q=lines.q, after=cursor, limit=page.limit + 1
            )
        except ValueError as error:
            raise invalid("after", str(error), "Use the cursor of the last line.") from None
        rows += [line for line in batch if line.seq > min_seq]
        if len(batch) <= page.limit or min_seq < 0:
            break
        cursor = batch[-1].cursor
    items = rows[: page.limit]
    return {"items": items, "next_cursor": items[-1].cursor if len(rows) > page.limit else None}


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The first `size` bytes; a file that grows meanwhile is not longer than announced."""
    with file:
        while size > 0 and (chunk := file.read(min(_CHUNK, size))):
            size -= len(chunk)
            yield chunk
