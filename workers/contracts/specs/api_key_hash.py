"""Hashes of API keys: a run's key is stored only as a salted PBKDF2 hash (RFC 8018)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from functools import partial

_SCHEME = "pbkdf2-sha256"
# about 5 ms: people may choose words as keys, and the hash is shown
_ROUNDS = 20_000
_MAX_ROUNDS = 1_000_000  # of a hash from outside


def hash_key(key: str) -> str:
    """`pbkdf2-sha256:<rounds>:<salt>:<digest>`; a hash is returned unchanged."""
    if is_hashed(key):
        return key
    salt = secrets.token_hex(8)
    return f"{_SCHEME}:{_ROUNDS}:{salt}:{_digest(key, salt, _ROUNDS)}"


def is_hashed(text: str) -> bool:
    """Whether `text` is a hash from `hash_key`."""
    return _parse(text) is not None


def key_matches(key: str, stored: str) -> bool:
    """Whether `key` is the stored one; a spec written by hand may store it in plain text."""
    parts = _parse(stored)
    if parts is None:
        return hmac.compare_digest(key.encode(), stored.encode())
    rounds, salt, digest = parts
    return hmac.compare_digest(_digest(key, salt, rounds), digest)


def key_checker(stored: str) -> Callable[[str], bool]:
    """`key_matches` for frequent calls: it recognizes the last right key by one fast hash."""
    last: list[bytes] = []

    def check(key: str, *, secret: bytes) -> bool:
        mark = hmac.digest(secret, key.encode(), "sha256")
        if last and hmac.compare_digest(mark, last[0]):
            return True
        if matches := key_matches(key, stored):
            last[:] = [mark]
        return matches

    return partial(check, secret=secrets.token_bytes(16))


def _digest(key: str, salt: str, rounds: int) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(), salt.encode(), rounds).hex()


def _parse(text: str) -> tuple[int, str, str] | None:
    scheme, *rest = text.split(":")
    if scheme != _SCHEME or len(rest) != 3 or not rest[0].isdecimal() or len(rest[2]) != 64:
        return None
    rounds = int(rest[0]) if len(rest[0]) < 9 else 0
    return (rounds, rest[1], rest[2]) if 0 < rounds <= _MAX_ROUNDS else None
