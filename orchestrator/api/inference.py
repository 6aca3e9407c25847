"""What runs that answer have to tell: a serve run's requests, a generate run's answers, an evaluate
run's results.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from django.http import HttpRequest, HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import needs
from orchestrator.api.http.lookup import run_of
from orchestrator.api.http.pagination import Page
from orchestrator.api.http.problems import invalid
from orchestrator.api.http.responses import streamed
from orchestrator.api.schemas import PageOf
from orchestrator.runs.outputs import endpoint, generated_answers
from orchestrator.runs.outputs import evaluation_results as results
from workers.contracts.wire.serving_reports import EngineState, Evaluated, Stood, Summary

router = Router(tags=["inference"])


class AnswerOut(Schema):
    number: int = Field(description="place in the input, from 1")
    id: Any
    asked: Any = Field(
        description="prompt, messages or token ids of the line; null where the input is elsewhere"
    )
    text: str | None = Field(description="null without a tokenizer")
    token_ids: list[int] = Field(description="the new ones")
    finish_reason: str | None


class RequestsOut(Schema):
    phase: Literal["waiting", "loading", "serving", "draining", "ended"]
    message: str
    base_url: str | None = Field(
        description="of an OpenAI client, below this server's own address; null once ended"
    )
    state: EngineState | None = Field(
        description="of the engine just now; null where no server answers"
    )
    summary: Summary | None = Field(description="over all requests that ended, once the run has")
    stood: Stood | None = Field(
        description="the engine's last known state, where no server answers"
    )


class WorstLine(Schema):
    id: Any
    by: str = Field(description="the number that lines are ranked by: a loss, or a score")
    value: float
    told: dict[str, Any] = Field(description="the line of results.jsonl")


class ResultsOut(Schema):
    results: Evaluated | None = Field(description="null before the run has any")
    worst: list[WorstLine] = Field(
        description="at most 20 lines that went worst, where their file is on this machine"
    )


@router.get(
    "/{int:id}/answers",
    response=PageOf[AnswerOut],
    auth=needs("read"),
    summary="Answers beside their prompts",
)
def answers(request: HttpRequest, id: int, page: Page) -> Any:
    """In the order of the input, as far as they are written."""
    run = _of_kind(request, id, "generate")
    found = generated_answers.page_of(run=run, after=page.cursor, limit=page.limit)
    return {"items": [asdict(each) for each in found.answers], "next_cursor": found.next}


@router.get(
    "/{int:id}/answers/download",
    auth=needs("read"),
    summary="All of them, as JSON lines",
    openapi_extra={"responses": {200: {"content": {"application/x-ndjson": {}}}}},
)
def answers_download(request: HttpRequest, id: int) -> HttpResponseBase:
    """Whole lines, as far as they are written."""
    run = _of_kind(request, id, "generate")
    name = generated_answers.places(run)[1].name
    response = streamed(request, generated_answers.pieces(run=run), "application/x-ndjson")
    response["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    return response


@router.get(
    "/{int:id}/requests",
    response=RequestsOut,
    auth=needs("read"),
    summary="Where it serves, and its requests",
)
def requests(request: HttpRequest, id: int) -> Any:
    """The engine's state while it serves, percentiles of all requests and its last state once it
    has ended.
    """
    run = _of_kind(request, id, "serve")
    found, state = endpoint.standing(run=run), endpoint.engine_state(run=run)
    return {
        "phase": found.phase,
        "message": found.message,
        "base_url": None if found.phase == "ended" else f"/serve/{run.pk}/v1",
        "state": state,
        "summary": endpoint.summary_of(run=run),
        "stood": endpoint.last_stood(run=run) if state is None else None,
    }


@router.get(
    "/{int:id}/results", response=ResultsOut, auth=needs("read"), summary="What an evaluation found"
)
def results_(request: HttpRequest, id: int) -> Any:
    run = _of_kind(request, id, "evaluate")
    told = results.evaluated(run=run)
    path = results.lines_file(run=run, told=told) if told is not None else None
    return {
        "results": told,
        "worst": [asdict(each) for each in results.worst(path, limit=20)] if path else [],
    }


def _of_kind(request: HttpRequest, id: int, kind: str) -> Any:
    run = run_of(request, id)
    if run.kind != kind:
        raise invalid("id", f"run {run.pk} is a {run.kind} run", f"a run of kind {kind}")
    return run
