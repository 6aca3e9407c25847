"""A key that a run keeps: after it was given, only what it can be checked by is written down
anywhere.

PBKDF2 (RFC 8018) over the key with a salt of its own. Knows neither who keeps it nor who asks.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from functools import partial

_SCHEME = "pbkdf2-sha256"
# some 5 ms: keys may be words that people chose, and what they are checked by is shown
_ROUNDS = 20_000
_MOST_ROUNDS = 1_000_000  # of what somebody else wrote


def hidden(key: str) -> str:
    """`pbkdf2-sha256:<rounds>:<salt>:<digest>`; what is so already stays as it is."""
    if is_hidden(key):
        return key
    salt = secrets.token_hex(8)
    return f"{_SCHEME}:{_ROUNDS}:{salt}:{_digest(key, salt, _ROUNDS)}"


def is_hidden(text: str) -> bool:
    return _parts(text) is not None


def is_key(given: str, kept: str) -> bool:
    """Whether `given` is the key that was kept, hidden or, as a spec by hand has it, readable."""
    parts = _parts(kept)
    if parts is None:
        return hmac.compare_digest(given.encode(), kept.encode())
    rounds, salt, digest = parts
    return hmac.compare_digest(_digest(given, salt, rounds), digest)


def checker(kept: str) -> Callable[[str], bool]:
    """`is_key` for one that is asked often: the key that was right is known again by one hash."""
    last: list[bytes] = []

    def quick(given: str, *, own: bytes) -> bool:
        mark = hmac.digest(own, given.encode(), "sha256")
        if last and hmac.compare_digest(mark, last[0]):
            return True
        if right := is_key(given, kept):
            last[:] = [mark]
        return right

    return partial(quick, own=secrets.token_bytes(16))


def _digest(key: str, salt: str, rounds: int) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), salt.encode(), rounds).hex()


def _parts(text: str) -> tuple[int, str, str] | None:
    scheme, *rest = text.split(":")
    if scheme != _SCHEME or len(rest) != 3 or not rest[0].isdecimal() or len(rest[2]) != 64:
        return None
    rounds = int(rest[0]) if len(rest[0]) < 9 else 0
    return (rounds, rest[1], rest[2]) if 0 < rounds <= _MOST_ROUNDS else None
