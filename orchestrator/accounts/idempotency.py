"""Idempotency keys: a creating request claims its key, runs, and stores its response for repeats.

The claim is a row, so two processes cannot both run the request. Does not depend on HTTP.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction

from orchestrator.accounts.models import IdempotencyKey, User
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, invalid

RETENTION = timedelta(hours=24)
# a claim without response for this long belongs to a process that has ended
_ABANDONED = timedelta(seconds=60)


def idempotent_begin(*, user: User, key: str, route: str, body: bytes | str) -> IdempotencyKey:
    """Claim the key for this user and route, or return the stored response.

    `status` None: execute the request, then call `idempotent_finish`, or `idempotent_abandon` if
    it was refused. Otherwise `status` and `answer` are the first response: return them again.
    Raises 422 for the same key with another body, and 409 with Retry-After while the first request
    is in progress. Call it outside a transaction: a claim counts once it is committed.
    """
    if not 1 <= len(key) <= 200:
        raise invalid("Idempotency-Key", "the key has 1 to 200 characters", "Use a UUID.")
    digest = hashlib.sha256(body.encode() if isinstance(body, str) else body).hexdigest()
    now = clock.now()
    try:
        with transaction.atomic():
            return IdempotencyKey.objects.create(
                user=user, key=key, route=route, body_digest=digest, created=now
            )
    except IntegrityError:
        return _known(user, key, route, digest, now)


def idempotent_finish(claim: IdempotencyKey, *, status: int, answer: Any) -> None:
    """Store the response, plain JSON data, for repeats within a day."""
    conditional.update(
        IdempotencyKey.objects.filter(pk=claim.pk, status=None), status=status, answer=answer
    )


def idempotent_abandon(claim: IdempotencyKey) -> None:
    """Release the key: nothing was created, and the request can be repeated."""
    IdempotencyKey.objects.filter(pk=claim.pk, status=None).delete()


def idempotent_purge(*, now: datetime) -> int:
    """Delete keys older than a day; returns how many."""
    return IdempotencyKey.objects.filter(created__lt=now - RETENTION).delete()[0]


def _known(user: User, key: str, route: str, digest: str, now: datetime) -> IdempotencyKey:
    row = IdempotencyKey.objects.filter(user=user, key=key, route=route).first()
    if row is None:  # abandoned between the two queries
        raise _busy(key)
    stale = row.created < now - (_ABANDONED if row.status is None else RETENTION)
    if stale:
        claim = IdempotencyKey.objects.filter(pk=row.pk, created=row.created)
        if not conditional.update(claim, body_digest=digest, status=None, answer=None, created=now):
            raise _busy(key)
        row.refresh_from_db()
        return row
    if row.body_digest != digest:
        raise Refusal(
            "idempotency-key-reused",
            "This key was used with another body",
            422,
            f"The Idempotency-Key {key!r} was used with another body. Send the same body, or a new "
            "key.",
        )
    if row.status is None:
        raise _busy(key)
    return row


def _busy(key: str) -> Refusal:
    return Refusal(
        "idempotency-key-in-use",
        "The first request is still in progress",
        409,
        f"A request with the Idempotency-Key {key!r} is in progress. Try again in 1 s.",
        retry_after_s=1,
    )
