"""Records dead letters within limits, and retries or drops them.

Does not decide which messages fail; the readers of streams and queues do.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final

import redis as redis_py
from django.db import transaction
from django.db.models import F

from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.accounts.services import audit, require_role
from orchestrator.common import clock, conditional, redis
from orchestrator.common.errors import Refusal, conflict
from orchestrator.dead_letters import retry_stamp
from orchestrator.dead_letters.models import DeadLetter, DeadLetterState
from workers.contracts.wire import names

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 1_000_000  # a larger message is recorded without its body
MAX_OPEN: Final = 1000  # per source and code; further ones are only counted and logged
_MAX_REASON: Final = 2000
# the shared streams, which only the control plane and nodes of release 0.1 write
_STREAMS: Final = {"telemetry": names.TELEMETRY, "reports": names.REPORTS}


def dead_letter_add(
    *, source: str, node: str, code: str, reason: str, message: bytes, written: float = 0.0
) -> DeadLetter | None:
    """Record a message that was removed from its stream; None above MAX_OPEN.

    The same message again raises its count of failures and opens it again. `written` is in Unix
    seconds by the broker's clock.
    """
    digest, now = hashlib.sha256(message).hexdigest(), clock.now()
    reason, node = _storable(reason)[:_MAX_REASON], _storable(node)[:80]
    with transaction.atomic():
        known = DeadLetter.objects.filter(source=source, digest=digest)
        again = known.update(
            failures=F("failures") + 1,
            state=DeadLetterState.OPEN,
            code=code,
            reason=reason,
            updated=now,
        )
        if again:
            return known.get()
        same = DeadLetter.objects.filter(source=source, code=code, state=DeadLetterState.OPEN)
        if same.count() >= MAX_OPEN:
            log.error("Dead letters of %s (%s) are full: one is dropped: %s", source, code, reason)
            return None
        body = message if len(message) <= MAX_BODY_BYTES else b""
        return DeadLetter.objects.create(
            source=source,
            node=node,
            code=code,
            reason=reason,
            body=body,
            size_bytes=len(message),
            digest=digest,
            written=written,
            created=now,
            updated=now,
        )


def dead_letter_retry(*, letter: DeadLetter, by: User) -> DeadLetter:
    """Put the message back into its stream. If it fails again, its letter opens again.

    Raises Refusal 409 if that is not possible, and 503 while the broker is unavailable.
    """
    require_role(by, Role.OPERATOR, "Retrying dead letters")
    if not retryable(letter):
        raise conflict(
            "The message cannot be retried: it came from the queue of jobs, or it was too large to "
            "be stored. Drop it.",
            type="not-retryable",
        )
    body = bytes(letter.body)
    fields: dict[str, str | bytes] = {
        names.FIELD_MESSAGE: body,
        names.FIELD_NODE: letter.node,
        retry_stamp.FIELD: retry_stamp.stamp(body, letter.written),
    }
    with transaction.atomic():
        _close(letter, DeadLetterState.RETRIED, by)
        try:
            redis.quick_client().xadd(_STREAMS[letter.source], fields)  # type: ignore[arg-type]
        except (redis_py.RedisError, OSError) as error:
            raise Refusal(
                "broker-unavailable",
                "The broker is unavailable",
                503,
                f"The message could not be requeued: {error}. Try again later.",
                retry_after_s=5,
            ) from None
    return letter


def dead_letter_drop(*, letter: DeadLetter, by: User) -> DeadLetter:
    """Give the message up; its row remains in the list of dropped ones."""
    require_role(by, Role.OPERATOR, "Dropping dead letters")
    with transaction.atomic():
        _close(letter, DeadLetterState.DROPPED, by)
    return letter


def retryable(letter: DeadLetter) -> bool:
    """Whether the message is complete and its stream is known."""
    return letter.source in _STREAMS and bool(letter.body)


def _close(letter: DeadLetter, state: DeadLetterState, by: User) -> None:
    open_ones = DeadLetter.objects.filter(pk=letter.pk, state=DeadLetterState.OPEN)
    if not conditional.update(open_ones, state=state, updated=clock.now()):
        letter.refresh_from_db()
        raise conflict(f"The message was already {letter.state}.", type="already-closed")
    verb = "retry" if state == DeadLetterState.RETRIED else "drop"
    data = {"source": letter.source, "node": letter.node, "code": letter.code}
    audit(actor=by, action=f"dead_letter.{verb}", target=f"dead_letter:{letter.pk}", data=data)
    letter.refresh_from_db()


def _storable(text: str) -> str:
    """Text without zero bytes and lone surrogates, which databases refuse."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
