"""Signed, expiring, single-use JSON envelopes, and the derivation of a node's secret from a token.

HMAC-SHA256 over the exact text that is sent; nothing is encrypted. Does not depend on message
bodies. Standard library only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from collections import OrderedDict
from typing import Any

_FIELDS = {"v", "kind", "node", "nonce", "exp", "body"}
VERSION = 1


class EnvelopeError(ValueError):
    """An invalid envelope; `code` is malformed, forged, expired, replayed or kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NonceCache:
    """Nonces seen, until they expire; a full cache drops the oldest. Thread-safe."""

    def __init__(self, limit: int = 100_000) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._limit = limit
        self._lock = threading.Lock()

    def first_time(self, nonce: str, expires: float, now: float) -> bool:
        """Store the nonce; False if it was seen before."""
        with self._lock:
            while self._seen and (
                next(iter(self._seen.values())) <= now or len(self._seen) >= self._limit
            ):
                self._seen.popitem(last=False)
            if self._seen.get(nonce, 0.0) > now:
                return False
            self._seen[nonce] = expires
            return True


def seal(
    secret: bytes,
    kind: str,
    body: dict[str, Any],
    *,
    ttl_s: float,
    now: float,
    node: str = "",
    nonce: str | None = None,
) -> str:
    """A signed text `MAC.JSON` of this kind, valid until `now + ttl_s` (Unix seconds).

    `node` names the node that sends or receives it, whose secret this is.
    """
    content = {
        "v": VERSION,
        "kind": kind,
        "node": node,
        "nonce": nonce or secrets.token_urlsafe(12),
    }
    text = json.dumps({**content, "exp": now + ttl_s, "body": body}, separators=(",", ":"))
    return f"{_mac(secret, 'envelope', text)}.{text}"


def open_envelope(
    secret: bytes, text: str | bytes, *, kind: str, now: float, seen: NonceCache | None = None
) -> dict[str, Any]:
    """The body of a valid envelope, once with `seen`. Raises EnvelopeError."""
    mac, payload = _split(text)
    if not hmac.compare_digest(mac.encode(), _mac(secret, "envelope", payload).encode()):
        raise EnvelopeError(
            "forged",
            "The signature does not match: wrong secret or altered text. Join the node again.",
        )
    content = _parse(payload)
    if content["kind"] != kind:
        raise EnvelopeError(
            "kind", f"This envelope is a {content['kind']!r}, only {kind!r} is accepted here."
        )
    if content["exp"] <= now:
        raise EnvelopeError(
            "expired",
            f"The envelope expired {now - content['exp']:.0f} s ago. Send it again, or set the "
            "clock.",
        )
    if seen is not None and not seen.first_time(content["nonce"], content["exp"], now):
        raise EnvelopeError(
            "replayed", "This envelope was opened before and is not accepted twice."
        )
    body = content["body"]
    assert isinstance(body, dict)
    return body


def peek(text: str | bytes) -> tuple[str, str]:
    """`(kind, node)` of an unverified envelope, only for choosing the secret."""
    content = _parse(_split(text)[1])
    return str(content["kind"]), str(content["node"])


def join_token_new() -> tuple[str, str]:
    """`(id, token)` of a new join token; the token is `id.key` and is shown once."""
    token_id = secrets.token_hex(6)
    return token_id, f"{token_id}.{secrets.token_urlsafe(32)}"


def join_token_parts(token: str) -> tuple[str, bytes]:
    """`(id, key)`. Raises EnvelopeError."""
    token_id, dot, key = token.strip().partition(".")
    if not (token_id and dot and key):
        raise EnvelopeError(
            "malformed", "This is not a join token (ID.KEY). Create one on the Nodes page."
        )
    return token_id, key.encode()


def join_request(token: str, *, name: str, nonce_a: str | None = None) -> dict[str, str]:
    """The request that a node sends: `{id, name, nonce_a, mac}`, without the key itself."""
    token_id, key = join_token_parts(token)
    nonce = nonce_a or secrets.token_urlsafe(24)
    return {
        "id": token_id,
        "name": name,
        "nonce_a": nonce,
        "mac": _mac(key, "join request", token_id, name, nonce),
    }


def join_reply(
    key: bytes, request: dict[str, Any], *, node: str, nonce_b: str | None = None
) -> tuple[dict[str, str], bytes]:
    """`(reply {nonce_b, node, mac}, the node's secret)` for a valid request.

    Raises EnvelopeError.
    """
    if not all(isinstance(request.get(part), str) for part in ("id", "name", "nonce_a", "mac")):
        raise EnvelopeError("malformed", "A join request has id, name, nonce_a and mac.")
    expected = _mac(key, "join request", request["id"], request["name"], request["nonce_a"])
    if not hmac.compare_digest(request["mac"].encode(), expected.encode()):
        raise EnvelopeError(
            "forged",
            "The join request was not made with this token. Check the token, or create a new one.",
        )
    nonce = nonce_b or secrets.token_urlsafe(24)
    mac = _mac(key, "join reply", request["nonce_a"], nonce, node)
    return {"nonce_b": nonce, "node": node, "mac": mac}, node_secret(key, request["nonce_a"], nonce)


def join_accept(token: str, request: dict[str, str], reply: dict[str, Any]) -> tuple[str, bytes]:
    """`(node name, the node's secret)` if the reply proves that its sender has the key.

    Raises EnvelopeError.
    """
    key = join_token_parts(token)[1]
    if not all(isinstance(reply.get(part), str) for part in ("nonce_b", "node", "mac")):
        raise EnvelopeError("malformed", "A join reply has nonce_b, node and mac.")
    expected = _mac(key, "join reply", request["nonce_a"], reply["nonce_b"], reply["node"])
    if not hmac.compare_digest(reply["mac"].encode(), expected.encode()):
        raise EnvelopeError(
            "forged",
            "The join reply was not made with this token. Another program answers on this Redis.",
        )
    return reply["node"], node_secret(key, request["nonce_a"], reply["nonce_b"])


def node_secret(key: bytes, nonce_a: str, nonce_b: str) -> bytes:
    """32 bytes that both sides derive; the secret is never sent."""
    return hmac.new(key, _joined("node secret", nonce_a, nonce_b), hashlib.sha256).digest()


def _mac(key: bytes, purpose: str, *parts: str) -> str:
    return hmac.new(key, _joined(purpose, *parts), hashlib.sha256).hexdigest()


def _joined(purpose: str, *parts: str) -> bytes:
    """Length-prefixed parts, so that different lists of parts never have the same bytes."""
    return b"".join(
        len(raw).to_bytes(8, "big") + raw for raw in (part.encode() for part in (purpose, *parts))
    )


def _split(text: str | bytes) -> tuple[str, str]:
    try:
        mac, dot, payload = (text.decode() if isinstance(text, bytes) else text).partition(".")
    except UnicodeDecodeError:
        raise EnvelopeError("malformed", "The envelope is not UTF-8 text.") from None
    if not dot or len(mac) != 64:
        raise EnvelopeError("malformed", "This is not an envelope (MAC.JSON).")
    return mac, payload


def _parse(payload: str) -> dict[str, Any]:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):  # the latter for thousands of nested brackets
        raise EnvelopeError("malformed", "The envelope does not contain JSON.") from None
    if (
        not isinstance(content, dict)
        or not content.keys() >= _FIELDS
        or not isinstance(content["body"], dict)
    ):
        raise EnvelopeError(
            "malformed", f"An envelope has the fields {', '.join(sorted(_FIELDS))}."
        )
    if content["v"] != VERSION:
        raise EnvelopeError(
            "malformed", f"The envelope has version {content['v']}, this side reads {VERSION}."
        )
    return content
