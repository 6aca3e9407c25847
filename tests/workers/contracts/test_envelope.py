"""Envelopes open once, in time, with the right secret; a node's secret comes out the same on both
sides.
"""

from __future__ import annotations

import json

import pytest

from workers.contracts.wire.envelope import (
    VERSION,
    EnvelopeError,
    NonceCache,
    _joined,
    _mac,
    join_accept,
    join_reply,
    join_request,
    join_token_new,
    join_token_parts,
    node_secret,
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


def test_a_join_gives_both_sides_one_secret_that_never_traveled() -> None:
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


def signed(payload: str, secret: bytes = SECRET) -> str:
    return f"{_mac(secret, 'envelope', payload)}.{payload}"


def fields(**changes: object) -> str:
    content = {"v": 1, "kind": "launch", "node": "n1", "nonce": "x", "exp": 10.0, "body": {}}
    return json.dumps({**content, **changes})


def test_an_envelope_is_valid_until_just_before_it_expires() -> None:
    text = seal(SECRET, "launch", {}, ttl_s=2.0, now=100.0)
    assert open_envelope(SECRET, text, kind="launch", now=101.999) == {}
    with pytest.raises(EnvelopeError, match=r"expired 0 s ago"):
        open_envelope(SECRET, text, kind="launch", now=102.0)
    with pytest.raises(EnvelopeError, match=r"expired 207 s ago"):
        open_envelope(SECRET, text, kind="launch", now=309.0)


def test_an_envelope_has_its_fields_version_and_kind() -> None:
    assert VERSION == 1
    assert open_envelope(SECRET, signed(fields()), kind="launch", now=1.0) == {}
    newer = signed(fields(more=1))
    assert open_envelope(SECRET, newer, kind="launch", now=1.0) == {}, "unknown fields are ignored"
    wrong = [
        "[]",
        "{",
        json.dumps(sorted(json.loads(fields()))),
        json.dumps({"v": 1, "kind": "launch", "body": {}}),
        fields(body=[]),
        fields(v=0),
        fields(v=2),
    ]
    for payload in wrong:
        assert code(open_envelope, SECRET, signed(payload), kind="launch", now=1.0) == "malformed"
    for kind in ("launc", "launch2", "a", "z"):
        assert code(open_envelope, SECRET, signed(fields()), kind=kind, now=1.0) == "kind"


def test_a_signature_has_64_characters() -> None:
    for length in (0, 63, 65):
        with pytest.raises(EnvelopeError, match="not an envelope") as caught:
            peek("0" * length + "." + fields())
        assert caught.value.code == "malformed"
    assert peek("0" * 64 + "." + fields()) == ("launch", "n1")
    assert code(peek, "0" * 64) == "malformed"
    with pytest.raises(EnvelopeError, match="not UTF-8"):
        peek(b"\xff" * 64 + b".{}")


def test_a_nonce_is_new_again_at_the_moment_it_expires() -> None:
    seen = NonceCache(limit=10)
    assert seen.first_time("a", expires=5.0, now=1.0)
    assert seen.first_time("b", expires=9.0, now=1.0)
    assert not seen.first_time("a", expires=6.0, now=4.999)
    assert seen.first_time("a", expires=20.0, now=5.0)
    assert not seen.first_time("b", expires=9.0, now=8.0)
    # an expired nonce behind one that still holds counts as new
    behind = NonceCache(limit=10)
    assert behind.first_time("long", expires=50.0, now=1.0)
    assert behind.first_time("short", expires=2.0, now=1.0)
    assert behind.first_time("short", expires=60.0, now=2.0)
    assert not behind.first_time("long", expires=50.0, now=3.0)


def test_a_full_nonce_cache_drops_only_the_oldest() -> None:
    seen = NonceCache(limit=2)
    assert [seen.first_time(nonce, 10.0, 1.0) for nonce in "abc"] == [True, True, True]
    assert not seen.first_time("c", 10.0, 1.0)  # makes room for itself: b is dropped
    assert seen.first_time("a", 10.0, 1.0)
    two = NonceCache(limit=3)
    assert [two.first_time(nonce, 10.0, 1.0) for nonce in "ab"] == [True, True]
    assert not two.first_time("a", 10.0, 1.0)


def test_the_signed_bytes_and_the_secret_are_those_of_version_1() -> None:
    assert _joined("p", "ab") == b"\0" * 7 + b"\1p" + b"\0" * 7 + b"\2ab"
    assert node_secret(b"k", "a", "b").hex().startswith("fb827f228c2abc16")
    assert seal(b"k", "launch", {}, ttl_s=1.0, now=2.0, node="n", nonce="x").partition(".")[2] == (
        '{"v":1,"kind":"launch","node":"n","nonce":"x","exp":3.0,"body":{}}'
    )


def test_tokens_and_nonces_are_long_and_random() -> None:
    token_id, token = join_token_new()
    assert len(token_id) == 12 and len(token.partition(".")[2]) == 43
    assert join_token_parts(f" {token}\n") == (token_id, token.partition(".")[2].encode())
    assert all(code(join_token_parts, wrong) == "malformed" for wrong in (".k", "i.", ".", ""))
    assert len(json.loads(seal(SECRET, "k", {}, ttl_s=1, now=1.0)[65:])["nonce"]) == 16
    request = join_request(token, name="n1")
    assert len(request["nonce_a"]) == 32
    assert join_request(token, name="n1", nonce_a="mine")["nonce_a"] == "mine"
    key = join_token_parts(token)[1]
    assert len(join_reply(key, request, node="n1")[0]["nonce_b"]) == 32
    assert join_reply(key, request, node="n1", nonce_b="mine")[0]["nonce_b"] == "mine"


def test_every_part_of_a_join_is_text_and_signed() -> None:
    _, token = join_token_new()
    key, request = join_token_parts(token)[1], join_request(token, name="n1")
    for part in request:
        assert code(join_reply, key, {**request, part: 1}, node="n1") == "malformed"
        assert code(join_reply, key, {**request, part: "other"}, node="n1") == "forged"
    reply, _ = join_reply(key, request, node="n1")
    for part in reply:
        assert code(join_accept, token, request, {**reply, part: None}) == "malformed"
        assert code(join_accept, token, request, {**reply, part: "other"}) == "forged"


def test_the_default_nonce_cache_holds_100_000() -> None:
    assert NonceCache()._limit == 100_000


def test_the_nonce_cache_drops_expired_nonces_and_never_exceeds_its_limit() -> None:
    seen = NonceCache(limit=300)
    assert seen.first_time("old", expires=5.0, now=1.0)
    assert seen.first_time("new", expires=9.0, now=5.0) and list(seen._seen) == ["new"]
    assert seen.first_time("newer", expires=12.0, now=11.0) and list(seen._seen) == ["newer"]
    for number in range(302):
        seen.first_time(str(number), expires=20.0, now=11.0)
    assert list(seen._seen) == [str(number) for number in range(2, 302)]
