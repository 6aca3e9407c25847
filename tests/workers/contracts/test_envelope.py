"""Envelopes open once, in time, with the right secret; a node's secret comes out the same on both
sides.
"""

from __future__ import annotations

import json

import pytest

from workers.contracts.wire.envelope import (
    EnvelopeError,
    NonceCache,
    join_accept,
    join_reply,
    join_request,
    join_token_new,
    join_token_parts,
    open_envelope,
    peek,
    seal,
)

SECRET = b"s" * 32


def code(call: object, *args: object, **kwargs: object) -> str:
    with pytest.raises(EnvelopeError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    assert str(caught.value).endswith((".", "there are", "read."))
    return caught.value.code


def test_what_is_sealed_opens_once_and_only_as_sealed() -> None:
    text = seal(SECRET, "launch", {"run": "1", "message": "größer"}, ttl_s=60, now=100.0, node="n1")
    seen = NonceCache()
    assert peek(text) == ("launch", "n1")
    assert open_envelope(SECRET, text.encode(), kind="launch", now=159.0, seen=seen) == {
        "run": "1",
        "message": "größer",
    }
    assert code(open_envelope, SECRET, text, kind="launch", now=159.0, seen=seen) == "replayed"
    assert code(open_envelope, SECRET, text, kind="launch", now=160.0) == "expired"
    assert code(open_envelope, SECRET, text, kind="control", now=110.0) == "kind"
    assert code(open_envelope, b"other", text, kind="launch", now=110.0) == "forged"
    assert (
        code(open_envelope, SECRET, text.replace('"1"', '"2"'), kind="launch", now=110.0)
        == "forged"
    )
    for broken in ("", "abc", b"\xff\xfe", "0" * 64 + ".[]", "0" * 64 + "." + json.dumps({"v": 1})):
        assert code(open_envelope, SECRET, broken, kind="launch", now=110.0) in {
            "malformed",
            "forged",
        }
        assert code(peek, broken) == "malformed"


def test_the_nonce_cache_forgets_what_expired_and_stays_bounded() -> None:
    seen = NonceCache(limit=3)
    assert all(seen.first_time(str(i), expires=10.0, now=1.0) for i in range(5))
    assert not seen.first_time("4", expires=10.0, now=1.0)
    assert seen.first_time("4", expires=30.0, now=20.0)


def test_a_join_gives_both_sides_one_secret_that_never_travelled() -> None:
    token_id, token = join_token_new()
    key = join_token_parts(token)[1]
    request = join_request(token, name="n1")
    reply, secret = join_reply(key, json.loads(json.dumps(request)), node="n1")
    assert join_accept(token, request, json.loads(json.dumps(reply))) == ("n1", secret)
    assert request["id"] == token_id and len(secret) == 32
    assert secret.hex() not in json.dumps([request, reply]) and key.decode() not in json.dumps(
        [request, reply]
    )
    # another exchange with the same token gives another secret
    assert join_reply(key, join_request(token, name="n1"), node="n1")[1] != secret


def test_a_join_with_another_token_is_refused_on_both_sides() -> None:
    (_, mine), (_, other) = join_token_new(), join_token_new()
    request = join_request(mine, name="n1")
    assert code(join_reply, join_token_parts(other)[1], request, node="n1") == "forged"
    reply, _ = join_reply(join_token_parts(mine)[1], request, node="n1")
    assert code(join_accept, mine, request, {**reply, "node": "n2"}) == "forged"
    assert code(join_accept, mine, request, {}) == "malformed"
    assert code(join_token_parts, "no-dot") == "malformed"
