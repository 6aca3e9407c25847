"""Results of inference runs: a serve run's requests, generated answers, evaluation results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponseBase
from django.utils.http import content_disposition_header
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.lookup import get_run
from orchestrator.api.http.pagination import Page
from orchestrator.api.http.problems import invalid
from orchestrator.api.http.responses import stream_response
from orchestrator.api.schemas.base import PageOf
from orchestrator.reviews import answer_votes
from orchestrator.runs.outputs import endpoint, generated_answers
from orchestrator.runs.outputs import evaluation_results as results
from workers.contracts.base import Contract
from workers.contracts.wire.serving_reports import (
    EngineSnapshot,
    EngineState,
    Evaluated,
    Summary,
    Wins,
)

router = Router(tags=["inference"])


class AnswerOut(Schema):
    """One generated answer with its prompt."""

    number: int = Field(description="position in the input, from 1")
    id: Any
    prompt: Any = Field(
        description="prompt, messages or token ids; null if the input is on another machine"
    )
    text: str | None = Field(description="null without a tokenizer")
    token_ids: list[int] = Field(description="generated tokens")
    finish_reason: str | None


class RequestsOut(Schema):
    """Where a serve run serves, and its requests."""

    phase: Literal["waiting", "loading", "serving", "draining", "ended"]
    message: str
    base_url: str | None = Field(
        description="path for an OpenAI client on this server; null after the run ended"
    )
    state: EngineState | None = Field(
        description="current state of the engine; null if no server answers"
    )
    summary: Summary | None = Field(description="over all finished requests, after the run ended")
    snapshot: EngineSnapshot | None = Field(
        description="the engine's last known state, if no server answers"
    )


class WorstLine(Schema):
    """A low-scoring example."""

    id: Any
    by: str = Field(description="the metric that ranks the examples: a loss or a score")
    value: float
    row: dict[str, Any] = Field(description="the row of results.jsonl")


class ResultsOut(Schema):
    """Results of an evaluate run."""

    results: Evaluated | None = Field(description="null before the first result")
    worst: list[WorstLine] = Field(
        description="the 20 lowest-scoring examples, if their file is on this machine"
    )


@router.get(
    "/{int:id}/answers",
    response=PageOf[AnswerOut],
    auth=require_scope("read"),
    summary="List generated answers",
)
def answers(request: HttpRequest, id: int, page: Page) -> Any:
    """Answers of a generate run with their prompts, in input order, as far as they are written."""
    run = _get_run_of_kind(request, id, "generate")
    answers = generated_answers.get_page(run=run, after=page.cursor, limit=page.limit)
    return {"items": [asdict(answer) for answer in answers.answers], "next_cursor": answers.next}


@router.get(
    "/{int:id}/answers/download",
    auth=require_scope("read"),
    summary="Download generated answers",
    openapi_extra={"responses": {200: {"content": {"application/x-ndjson": {}}}}},
)
def answers_download(request: HttpRequest, id: int) -> HttpResponseBase:
    """All answers as JSON lines, as far as they are written."""
    run = _get_run_of_kind(request, id, "generate")
    name = generated_answers.file_paths(run)[1].name
    response = stream_response(
        request, generated_answers.read_chunks(run=run), "application/x-ndjson"
    )
    response["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    return response


@router.get(
    "/{int:id}/requests",
    response=RequestsOut,
    auth=require_scope("read"),
    summary="Get serving status",
)
def requests(request: HttpRequest, id: int) -> Any:
    """The engine's state while it serves; afterwards latency percentiles and the last state."""
    run = _get_run_of_kind(request, id, "serve")
    status, state = endpoint.status(run=run), endpoint.engine_state(run=run)
    return {
        "phase": status.phase,
        "message": status.message,
        "base_url": None if status.phase == "ended" else f"/serve/{run.pk}/v1",
        "state": state,
        "summary": endpoint.summary_of(run=run),
        "snapshot": endpoint.last_snapshot(run=run) if state is None else None,
    }


@router.get(
    "/{int:id}/results",
    response=ResultsOut,
    auth=require_scope("read"),
    summary="Get evaluation results",
)
def results_(request: HttpRequest, id: int) -> Any:
    """Metrics of an evaluate run and its lowest-scoring examples."""
    run = _get_run_of_kind(request, id, "evaluate")
    evaluation = results.evaluated(run=run)
    worst = results.worst(run=run, evaluation=evaluation, limit=20) if evaluation else None
    return {"results": evaluation, "worst": [asdict(line) for line in worst or []]}


class BlindPairOut(Schema):
    """An example's two answers in random order."""

    example: int
    prompt: str | None
    a: str
    b: str


class AnswerVotesOut(Schema):
    """People's votes between answers before and after training, and your next pair."""

    is_available: bool = Field(
        description="false without a baseline, or if the answers are on another machine"
    )
    wins: Wins | None = Field(description="of the answers after training; null before a vote")
    voters: int
    pairs: int = Field(description="examples with two different answers")
    next: BlindPairOut | None


class NewAnswerVote(Contract):
    """Which answer is better."""

    example: Annotated[int, Field(ge=0, le=2**31 - 1)]
    choice: Literal["a", "b", "tie"]


@router.get(
    "/{int:id}/answer-votes",
    response=AnswerVotesOut,
    auth=require_scope("read"),
    summary="Get votes on answers before and after training",
)
def answer_votes_(request: HttpRequest, id: int) -> Any:
    """The win rate by people with its 95% interval (Wilson), and the next pair to vote on."""
    run = _get_run_of_kind(request, id, "evaluate")
    return asdict(answer_votes.vote_state(run=run, user=user(request)))


@router.post(
    "/{int:id}/answer-votes",
    response={201: AnswerVotesOut},
    auth=require_scope("runs"),
    summary="Vote between answers before and after training",
)
def answer_vote(request: HttpRequest, id: int, body: NewAnswerVote) -> Any:
    """One vote per person and example."""
    run = _get_run_of_kind(request, id, "evaluate")
    answer_votes.vote(run=run, by=user(request), example=body.example, choice=body.choice)
    return 201, asdict(answer_votes.vote_state(run=run, user=user(request)))


def _get_run_of_kind(request: HttpRequest, id: int, kind: str) -> Any:
    run = get_run(request, id)
    if run.kind != kind:
        raise invalid("id", f"run {run.pk} is a {run.kind} run", f"Use a run of kind {kind}.")
    return run
