"""One answer per idempotency key: a creating request claims its key, works, and leaves its answer
for repeats.

Knows keys, digests and answers; does not know HTTP. The claim is a row, so two processes cannot
both work.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction

from orchestrator.accounts.models import IdempotencyKey, User
from orchestrator.common import clock, conditional
from orchestrator.common.errors import Refusal, invalid

KEPT = timedelta(hours=24)
# a claim without answer for so long belongs to a process that died at work
_ABANDONED = timedelta(seconds=60)


def idempotent_begin(*, user: User, key: str, route: str, body: bytes | str) -> IdempotencyKey:
    """Claims the key for this user and route, or finds the answer given before.

    `status` None: the claim is yours, do the work, then `idempotent_finish`, or
    `idempotent_abandon` if it was refused.
    Otherwise `status` and `answer` are what the first call answered: give them again.
    Raises 422 for the same key with another body and 409 with Retry-After while the first call is
    at work.
    Call it outside a transaction: a claim counts once it is committed.
    """
    if not 1 <= len(key) <= 200:
        raise invalid("Idempotency-Key", "the key has 1 to 200 characters", "a UUID")
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
    """Stores the answer, plain JSON data, for repeats within a day."""
    conditional.move(
        IdempotencyKey.objects.filter(pk=claim.pk, status=None), status=status, answer=answer
    )


def idempotent_abandon(claim: IdempotencyKey) -> None:
    """Gives the key back: nothing was created, and the same request may be tried again."""
    IdempotencyKey.objects.filter(pk=claim.pk, status=None).delete()


def idempotent_purge(*, now: datetime) -> int:
    """Forgets keys older than a day; returns how many."""
    return IdempotencyKey.objects.filter(created__lt=now - KEPT).delete()[0]


def _known(user: User, key: str, route: str, digest: str, now: datetime) -> IdempotencyKey:
    row = IdempotencyKey.objects.filter(user=user, key=key, route=route).first()
    if row is None:  # abandoned between our two looks
        raise _busy(key)
    stale = row.created < now - (_ABANDONED if row.status is None else KEPT)
    if stale:
        mine = IdempotencyKey.objects.filter(pk=row.pk, created=row.created)
        if not conditional.move(mine, body_digest=digest, status=None, answer=None, created=now):
            raise _busy(key)
        row.refresh_from_db()
        return row
    if row.body_digest != digest:
        raise Refusal(
            "idempotency-key-reused",
            "This key was used with another body",
            422,
            f"The Idempotency-Key {key!r} came before with another body. Send the same body, or a "
            "new key.",
        )
    if row.status is None:
        raise _busy(key)
    return row


def _busy(key: str) -> Refusal:
    return Refusal(
        "idempotency-key-in-use",
        "The first request is still at work",
        409,
        f"A request with the Idempotency-Key {key!r} is being answered now. Ask again in a second.",
        retry_after_s=1,
    )
