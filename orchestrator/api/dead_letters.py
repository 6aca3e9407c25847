"""Dead letters: messages that could not be processed. Retry puts one back, drop gives it up."""

from __future__ import annotations

from typing import Any, Literal

from django.http import HttpRequest
from ninja import Field, Router, Schema

from orchestrator.api.http.auth import require_scope, user
from orchestrator.api.http.pagination import paginated
from orchestrator.dead_letters import selectors, services

router = Router(tags=["fleet"])


class DeadLetterOut(Schema):
    """A message that could not be processed."""

    id: int
    source: str = Field(description="stream or queue: telemetry, reports or jobs")
    node: str = Field(description="the sender, as the message claims")
    code: str = Field(description="stable reason, also a label of /metrics")
    reason: str
    failures: int
    state: str = Field(description="open, retried or dropped")
    size_bytes: int
    excerpt: str = Field(description="the beginning of the message")
    retryable: bool
    created: str
    updated: str


@router.get(
    "", response=list[DeadLetterOut], auth=require_scope("fleet"), summary="List dead letters"
)
@paginated(name="dead-letters", serialize=selectors.serialize_dead_letter, newest_first=True)
def dead_letters(
    request: HttpRequest, state: Literal["open", "retried", "dropped"] = "open"
) -> Any:
    """Messages of nodes that could not be processed, newest first."""
    return selectors.dead_letters(by=user(request), state=state)


@router.post(
    "/{int:id}/retry",
    response=DeadLetterOut,
    auth=require_scope("fleet"),
    summary="Retry a dead letter",
)
def retry(request: HttpRequest, id: int) -> Any:
    """Puts the message back into its stream. If it fails again, its letter opens again."""
    letter = selectors.dead_letter_get(by=user(request), id=id)
    return selectors.serialize_dead_letter(
        services.dead_letter_retry(letter=letter, by=user(request))
    )


@router.post(
    "/{int:id}/drop",
    response=DeadLetterOut,
    auth=require_scope("fleet"),
    summary="Drop a dead letter",
)
def drop(request: HttpRequest, id: int) -> Any:
    """Gives the message up."""
    letter = selectors.dead_letter_get(by=user(request), id=id)
    return selectors.serialize_dead_letter(
        services.dead_letter_drop(letter=letter, by=user(request))
    )
