"""The field that marks a stream entry as retried: it has the time of the first writing, signed.

Envelopes expire relative to the time of writing. Only the control plane can sign, so no
other program extends an envelope's life.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from django.core.signing import BadSignature, Signer

FIELD: Final = "retry"
_signer = Signer(salt="orrery.dead_letters.retry")


def stamp(message: bytes, written: float) -> str:
    """The field's value for a message that was first written at `written` (Unix seconds)."""
    return _signer.sign(f"{hashlib.sha256(message).hexdigest()}@{written!r}")


def first_written(fields: Mapping[bytes, bytes], message: bytes) -> float | None:
    """The signed time of the first writing; None if the entry is not a valid retry."""
    value = fields.get(FIELD.encode())
    if value is None:
        return None
    try:
        digest, _, written = _signer.unsign(value.decode("utf-8", "replace")).partition("@")
    except BadSignature:
        return None
    return float(written) if digest == hashlib.sha256(message).hexdigest() else None
