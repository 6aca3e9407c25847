"""Side-by-side chats of two served models with blind votes, and the votes as preference data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.idempotency import creates
from orchestrator.api.http.pagination import paginated
from orchestrator.api.reviews import ReviewedFileOut
from orchestrator.api.schemas.base import Id, Time
from orchestrator.reviews import comparisons, reviewed_files, votes
from workers.contracts.base import Contract

router = Router(tags=["data"])
LOCATION = "/api/v1/model-comparisons/{id}"
_RunId = Annotated[int, Field(ge=1, le=2**63 - 1)]


class NewComparison(Contract):
    """Two serve runs that you may see."""

    runs: Annotated[list[_RunId], Field(min_length=2, max_length=2)]
    models: Annotated[
        list[Annotated[str, Field(max_length=400)] | None],
        Field(min_length=2, max_length=2, description="ids of /v1/models; default: the run's own"),
    ] = [None, None]
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=comparisons.MOST_TOKENS)] = 512
    system: Annotated[str, Field(max_length=comparisons.MOST_TEXT)] = ""


class ComparisonOut(Schema):
    """Two models that answer the same messages."""

    id: Id
    owner: str
    created: Time
    runs: list[int]
    models: list[str]
    sampling: dict[str, Any]


class NewTurn(Contract):
    """A message to both models."""

    text: Annotated[str, Field(min_length=1, max_length=comparisons.MOST_TEXT)]
    conversation: Annotated[
        _RunId | None, Field(description="continue after the answer voted for; default: a new one")
    ] = None


class TurnOut(Schema):
    """Both answers; `models` names who gave `a` and `b`, after the vote."""

    id: int
    conversation: int
    messages: list[dict[str, Any]]
    a: str
    b: str
    choice: str | None
    models: list[str] | None
    by: str
    created: Time
    voted: Time | None


class Vote(Contract):
    """Which answer is better."""

    choice: Literal["a", "b", "tie", "both_bad"]


class PairOut(Schema):
    """Votes on two models; the rate counts ties as half, with its 95% interval (Wilson)."""

    first: str
    second: str
    wins: int = Field(description="of the first")
    losses: int
    ties: int
    both_bad: int
    win_rate: float | None
    low: float | None
    high: float | None


class PairsOut(Schema):
    """Votes per pair of models."""

    items: list[PairOut]


@router.get(
    "", response=list[ComparisonOut], auth=require_scope("read"), summary="List model comparisons"
)
@paginated(name="model-comparisons", newest_first=True, serialize=lambda row: _out(row))
def comparison_list(request: HttpRequest) -> Any:
    """Comparisons that you may see, newest first."""
    return votes.comparisons_visible_to(user=user(request)).order_by("-pk")


@router.post(
    "", response={201: ComparisonOut}, auth=require_scope("runs"), summary="Compare two models"
)
@creates(ComparisonOut, location=LOCATION)
def comparison_create(request: HttpRequest, body: NewComparison) -> Any:
    """Starts a side-by-side chat. 409 if a run does not serve."""
    row = comparisons.comparison_create(
        by=user(request),
        run_ids=body.runs,
        models=body.models,
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=body.max_tokens,
        system=body.system,
    )
    return _out(row)


@router.get("/votes", response=PairsOut, auth=require_scope("read"), summary="List votes by pair")
def votes_list(request: HttpRequest) -> Any:
    """Win rates over all comparisons that you may see."""
    return {"items": [asdict(pair) for pair in votes.table(user=user(request))]}


@router.get(
    "/{int:id}", response=ComparisonOut, auth=require_scope("read"), summary="Get a comparison"
)
def comparison(request: HttpRequest, id: int) -> Any:
    """One comparison."""
    return _out(_comparison(request, id))


@router.get(
    "/{int:id}/turns", response=list[TurnOut], auth=require_scope("read"), summary="List turns"
)
@paginated(name="turns", newest_first=True, serialize=comparisons.serialize_turn)
def turns(request: HttpRequest, id: int) -> Any:
    """Messages with both answers and their votes, newest first."""
    return comparisons.turn_rows(comparison=_comparison(request, id))


@router.post(
    "/{int:id}/turns",
    response={201: TurnOut},
    auth=require_scope("runs"),
    summary="Ask both models",
)
@creates(TurnOut)
def turn_create(request: HttpRequest, id: int, body: NewTurn) -> Any:
    """Both answers to a message, in an order drawn by chance."""
    turn = comparisons.turn_create(
        comparison=_comparison(request, id),
        by=user(request),
        text=body.text,
        conversation=body.conversation,
    )
    return comparisons.serialize_turn(turn)


@router.post(
    "/{int:id}/turns/{int:turn}/vote",
    response=TurnOut,
    auth=require_scope("runs"),
    summary="Vote on a turn",
)
def turn_vote(request: HttpRequest, id: int, turn: int, body: Vote) -> Any:
    """Stores the vote, once, and returns which model gave which answer."""
    row = comparisons.turn_get(comparison=_comparison(request, id), id=turn)
    return comparisons.serialize_turn(
        comparisons.turn_vote(turn=row, by=user(request), choice=body.choice)
    )


@router.post(
    "/{int:id}/data-sets",
    response={201: ReviewedFileOut},
    auth=require_scope("runs"),
    summary="Write votes to a reviewed file",
)
@creates(ReviewedFileOut)
def reviewed_file_create(request: HttpRequest, id: int) -> Any:
    """Writes the votes as preference pairs to a new file that runs can read."""
    row = _comparison(request, id)
    return reviewed_files.votes_write(
        comparison=row, by=user(request), lines=votes.preference_lines(row)
    )


def _comparison(request: HttpRequest, id: int) -> Any:
    return votes.comparison_get(user=user(request), id=id)


def _out(row: Any) -> dict[str, Any]:
    return {
        "id": row.pk,
        "owner": row.owner.username,
        "created": row.created,
        "runs": row.runs,
        "models": row.model_ids,
        "sampling": row.sampling,
    }
