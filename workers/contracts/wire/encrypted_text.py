"""Encrypts short texts under a key that both sides have, such as a node's secret.

HMAC-SHA256 in counter mode with a random nonce, then an HMAC over nonce and ciphertext; the two
keys are derived separately. Standard library only. Does not depend on what the texts are.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

_VERSION = "1:"
_NONCE, _TAG = 16, 32


class Undecryptable(ValueError):
    """The text was changed, or encrypted under another key or for another purpose."""


def encrypt(key: bytes, text: str, *, purpose: str) -> str:
    """The text under the key; `purpose` must be the same for `decrypt`."""
    plain, nonce = text.encode(), secrets.token_bytes(_NONCE)
    cipher_key, tag_key = _keys(key, purpose)
    body = nonce + _mask(cipher_key, nonce, plain)
    return _VERSION + base64.urlsafe_b64encode(body + _tag(tag_key, body)).decode()


def decrypt(key: bytes, stored: str, *, purpose: str) -> str:
    """The text. Raises Undecryptable if the key or the purpose does not fit."""
    try:
        raw = base64.urlsafe_b64decode(stored.removeprefix(_VERSION).encode())
    except ValueError:
        raw = b""
    body, tag = raw[:-_TAG], raw[-_TAG:]
    cipher_key, tag_key = _keys(key, purpose)
    if len(body) < _NONCE or not hmac.compare_digest(tag, _tag(tag_key, body)):
        raise Undecryptable("the key does not decrypt this text")
    return _mask(cipher_key, body[:_NONCE], body[_NONCE:]).decode()


def _keys(key: bytes, purpose: str) -> tuple[bytes, bytes]:
    def derived(use: str) -> bytes:
        return _tag(key, f"orrery secret text\0{purpose}\0{use}".encode())

    return derived("cipher"), derived("tag")


def _mask(key: bytes, nonce: bytes, data: bytes) -> bytes:
    blocks = range(-(-len(data) // 32))
    stream = b"".join(_tag(key, nonce + block.to_bytes(8, "big")) for block in blocks)
    return bytes(a ^ b for a, b in zip(data, stream, strict=False))


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()
