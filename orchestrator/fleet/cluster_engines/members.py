"""Identities of supervisors in jobs of engines: one secret per attempt and node of the job.

A job runs as its submitter, who can read the secret; it is therefore valid for this attempt only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from django.conf import settings

from orchestrator.fleet.models import Engine, EngineMember
from workers.contracts.wire import envelope
from workers.contracts.wire.cluster_engines.jobs import member_name

LATE = timedelta(days=1)  # telemetry that arrives later is refused


def members_create(*, engine: Engine, attempt_id: int, nodes: int) -> list[EngineMember]:
    """The members of an attempt on `nodes` nodes, by node rank; the same if they exist."""
    names = [member_name(engine.name, attempt_id, rank) for rank in range(nodes)]
    EngineMember.objects.bulk_create(
        (
            EngineMember(
                name=name,
                engine=engine,
                attempt_id=attempt_id,
                nonces=f"{secrets.token_hex(16)} {secrets.token_hex(16)}",
                key_id=_key_id(settings.SECRET_KEY),
            )
            for name in names
        ),
        ignore_conflicts=True,
    )
    rows = {row.name: row for row in EngineMember.objects.filter(name__in=names)}
    return [rows[name] for name in names]


def member_named(name: str) -> EngineMember | None:
    """The member of this name."""
    return EngineMember.objects.filter(name=name).first()


def member_names() -> list[str]:
    """Names of the members whose messages are accepted."""
    return list(EngineMember.objects.values_list("name", flat=True))


def member_secret(member: EngineMember) -> bytes:
    """The key of all envelopes from and to the member. ValueError without its server key."""
    for server_key in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        if _key_id(server_key) == member.key_id:
            text = f"engine member {member.name}".encode()
            key = hmac.new(server_key.encode(), text, hashlib.sha256).digest()
            return envelope.node_secret(key, *member.nonces.split(" "))
    raise ValueError(
        f"{member.name} was created under an earlier secret key. Add that key to "
        "ORRERY_SECRET_KEY_FALLBACKS."
    )


def member_secrets(names: Collection[str] | None = None) -> list[tuple[str, bytes]]:
    """`(name, secret)` of these members, or of all, that have not ended and can be read."""
    rows = EngineMember.objects.all()
    pairs = []
    for member in rows if names is None else rows.filter(name__in=names):
        try:
            pairs.append((member.name, member_secret(member)))
        except ValueError:
            continue
    return pairs


def members_end(*, attempt_ids: Sequence[int], now: datetime) -> None:
    """Record that these attempts have ended."""
    EngineMember.objects.filter(attempt_id__in=attempt_ids, ended=None).update(ended=now)


def members_expire(*, now: datetime) -> list[str]:
    """Delete the members whose attempts ended a day ago; returns their names."""
    old = EngineMember.objects.filter(ended__lt=now - LATE)
    names = list(old.values_list("name", flat=True)[:500])
    EngineMember.objects.filter(name__in=names).delete()
    return names


def _key_id(server_key: str) -> str:
    return hmac.new(server_key.encode(), b"key id", hashlib.sha256).hexdigest()[:16]
