"""What a produce run has made: its progress by filter, accepted and rejected lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from django.http import HttpRequest, HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Query, Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.pagination import Page
from orchestrator.api.http.problems import invalid
from orchestrator.api.http.responses import stream_response
from orchestrator.api.schemas.base import PageOf
from orchestrator.runs.outputs import produced_lines
from orchestrator.telemetry import selectors as telemetry
from workers.contracts.base import Contract

router = Router(tags=["data"])


class StageOut(Schema):
    """One filter of the funnel."""

    kind: str
    rejected: int
    left: int = Field(description="candidates that this filter and those before it accept")


class ProgressOut(Schema):
    """Totals of a produce run over all attempts."""

    wanted: int
    accepted: int
    rejected: int = Field(description="lines without an accepted candidate")
    candidates: int
    stages: list[StageOut] = Field(description="in the order in which filters are applied")
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float | None = Field(description="null without prices")
    tokens_per_s: float | None
    lines_per_s: float | None
    eta_s: float | None


class ProducedOut(Schema):
    """One line."""

    offset: int = Field(description="of the line in its file, in bytes")
    content: dict[str, Any] = Field(description="the line, with task_type and provenance")


class LinesWanted(Contract):
    """Which file."""

    which: Literal["accepted", "rejected"] = "accepted"


@router.get(
    "/{int:id}/produced",
    response=ProgressOut,
    auth=require_scope("read"),
    summary="Get the progress of a produce run",
)
def progress(request: HttpRequest, id: int) -> Any:
    """Accepted and rejected lines, candidates by filter, tokens and cost."""
    run = _produce_run(request, id)
    values = produced_lines.progress(run=run, latest=telemetry.latest(run=run))
    assert values is not None
    return asdict(values)


@router.get(
    "/{int:id}/lines",
    response=PageOf[ProducedOut],
    auth=require_scope("read"),
    summary="List produced lines",
)
def lines(request: HttpRequest, id: int, page: Page, wanted: Query[LinesWanted]) -> Any:
    """Accepted or rejected lines, newest first, with their provenance. 409 if the file is on
    another machine.
    """
    listed = produced_lines.get_page(
        run=_produce_run(request, id), which=wanted.which, after=page.cursor, limit=page.limit
    )
    return {"items": [asdict(line) for line in listed.lines], "next_cursor": listed.next}


@router.get(
    "/{int:id}/lines/download",
    auth=require_scope("read"),
    summary="Download produced lines",
    openapi_extra={"responses": {200: {"content": {"application/x-ndjson": {}}}}},
)
def lines_download(request: HttpRequest, id: int, wanted: Query[LinesWanted]) -> HttpResponseBase:
    """All accepted or rejected lines, as far as they are written."""
    run = _produce_run(request, id)
    name = produced_lines.file_path(run=run, which=wanted.which).name
    response = stream_response(
        request, produced_lines.read_chunks(run=run, which=wanted.which), "application/x-ndjson"
    )
    response["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    return response


def _produce_run(request: HttpRequest, id: int) -> Any:
    run = get_run(request, id)
    if produced_lines.body_of(run) is None:
        raise invalid("id", f"run {run.pk} is a {run.kind} run", "Use a run of kind produce.")
    return run
