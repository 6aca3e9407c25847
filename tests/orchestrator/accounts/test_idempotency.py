"""The same key and body get the same response, and the request runs once."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

from orchestrator.accounts import services
from orchestrator.accounts.models import IdempotencyKey, User
from orchestrator.common.errors import Refusal
from tests import factories


def begin(user: User, body: bytes = b"{}", key: str = "k") -> IdempotencyKey:
    return services.idempotent_begin(user=user, key=key, route="POST /runs", body=body)


def test_a_repeat_gets_the_first_answer(owner: User, teammate: User) -> None:
    claim = begin(owner)
    assert claim.status is None
    services.idempotent_finish(claim, status=201, answer={"id": "12"})
    again = begin(owner)
    assert (again.status, again.answer) == (201, {"id": "12"})
    assert begin(teammate).status is None, "keys are a user's own"


def test_another_body_is_refused(owner: User) -> None:
    services.idempotent_finish(begin(owner), status=201, answer={})
    with pytest.raises(Refusal) as refused:
        begin(owner, b'{"name": "other"}')
    assert (refused.value.status, refused.value.type) == (422, "idempotency-key-reused")


def test_a_pending_claim_blocks_repeats_until_abandoned_or_expired(owner: User, clock) -> None:
    claim = begin(owner)
    with pytest.raises(Refusal) as refused:
        begin(owner)
    assert (refused.value.status, refused.value.retry_after_s) == (409, 1)
    services.idempotent_abandon(claim)
    begin(owner)
    clock.advance(61)  # its process died
    assert begin(owner, b"changed since").status is None


def test_keys_are_forgotten_after_a_day(owner: User, clock) -> None:
    services.idempotent_finish(begin(owner), status=201, answer={})
    services.idempotent_finish(begin(owner, key="second"), status=201, answer={})
    clock.advance(24 * 3600 + 1)
    assert begin(owner, b"another body").status is None
    assert services.idempotent_purge(now=clock.now()) == 1


def test_a_key_has_a_length(owner: User) -> None:
    for key in ("", "x" * 201):
        with pytest.raises(Refusal):
            begin(owner, key=key)


@pytest.mark.django_db(transaction=True)
def test_one_of_many_concurrent_claims_wins() -> None:
    user = factories.user("ada")
    won, refused, start = [], [], threading.Barrier(6)

    def send() -> None:
        start.wait()
        try:
            (won if begin(user).status is None else refused).append(1)
        except Refusal:
            refused.append(1)
        finally:
            connection.close()

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 5)
