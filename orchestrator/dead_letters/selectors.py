"""Reads dead letters. Only operators see them: messages have data of all teams."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, QuerySet

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.accounts.services import require_role
from orchestrator.common.errors import missing_object
from orchestrator.common.units import iso
from orchestrator.dead_letters.models import DeadLetter, DeadLetterState
from orchestrator.dead_letters.services import retryable

_EXCERPT = 500  # characters


def dead_letters(*, by: User, state: str = DeadLetterState.OPEN) -> QuerySet[DeadLetter]:
    """Letters in this state, newest first. Raises Refusal 403."""
    require_role(by, Role.OPERATOR, "The list of dead letters")
    return DeadLetter.objects.filter(state=state).order_by("-pk")


def dead_letter_get(*, by: User, id: int) -> DeadLetter:
    """One letter. Raises Refusal 403 or 404."""
    require_role(by, Role.OPERATOR, "The list of dead letters")
    letter = DeadLetter.objects.filter(pk=id).first()
    if letter is None:
        raise missing_object("dead letter", id)
    return letter


def open_counts() -> dict[tuple[str, str], int]:
    """`(source, code)` → number of open letters."""
    rows = DeadLetter.objects.filter(state=DeadLetterState.OPEN).values_list("source", "code")
    return {(source, code): count for source, code, count in rows.annotate(count=Count("pk"))}


def serialize_dead_letter(letter: DeadLetter) -> dict[str, Any]:
    """The letter for REST and pages; `excerpt` is the beginning of the message."""
    return {
        "id": letter.pk,
        "source": letter.source,
        "node": letter.node,
        "code": letter.code,
        "reason": letter.reason,
        "failures": letter.failures,
        "state": letter.state,
        "size_bytes": letter.size_bytes,
        "excerpt": bytes(letter.body[:_EXCERPT]).decode("utf-8", "replace"),
        "retryable": retryable(letter),
        "created": iso(letter.created),
        "updated": iso(letter.updated),
    }
