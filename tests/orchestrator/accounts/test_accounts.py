"""Users, tokens, roles, the audit log, and the command that prints a token."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from orchestrator.accounts import selectors, services
from orchestrator.accounts.models import ApiToken, User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import Refusal
from tests import factories


def test_a_token_works_until_it_is_revoked(owner: User, clock: object) -> None:
    token, text = services.token_create(user=owner, name="laptop", by=owner)
    assert text.startswith("orr_") and text not in str(ApiToken.objects.values())
    assert selectors.token_user(text) == (owner, token)
    assert token.scopes == ["read", "tokens", "runs", "ingest"]
    services.token_revoke(token=token, by=owner)
    services.token_revoke(token=token, by=owner)
    assert selectors.token_user(text) is None
    assert [entry.action for entry in selectors.audit_entries(user=owner)] == [
        "token.revoke",
        "token.create",
    ]


def test_an_expired_token_is_refused(owner: User, clock) -> None:
    _, text = services.token_create(
        user=owner, name="ci", expires=clock.now() + timedelta(hours=1), by=owner
    )
    clock.advance(3599)
    assert selectors.token_check(text)[0] == owner
    clock.advance(1)
    with pytest.raises(Refusal) as refused:
        selectors.token_check(text)
    assert (refused.value.status, refused.value.type) == (401, "token-expired")
    assert "2026-01-01T01:00:00Z" in refused.value.detail


@pytest.mark.parametrize("text", ["", "orr_", "orr_nobody", "Bearer x", "öß"])
def test_malformed_tokens_are_refused(owner: User, text: str) -> None:
    assert selectors.token_user(text) is None


def test_a_disabled_account_is_refused(owner: User) -> None:
    _, text = services.token_create(user=owner, name="laptop", by=owner)
    assert selectors.token_user(text) is not None
    User.objects.filter(pk=owner.pk).update(is_active=False)
    assert selectors.token_user(text) is None


def test_use_is_recorded_once_per_minute(owner: User, clock, django_assert_num_queries) -> None:
    _, text = services.token_create(user=owner, name="laptop", by=owner)
    with django_assert_num_queries(2):
        selectors.token_check(text)
    with django_assert_num_queries(1):
        selectors.token_check(text)
    later = clock.advance(60)
    selectors.token_check(text)
    assert ApiToken.objects.get().last_used == later


def test_scopes_stay_within_the_role(stranger: User, owner: User, admin: User) -> None:
    assert services.token_create(user=stranger, name="look", by=stranger)[0].scopes == [
        "read",
        "tokens",
    ]
    with pytest.raises(Refusal) as refused:
        services.token_create(user=stranger, name="more", scopes=["runs"], by=stranger)
    assert refused.value.status == 422 and "submitter" in refused.value.detail
    with pytest.raises(Refusal):
        services.token_create(user=owner, name="typo", scopes=["rnus"], by=owner)
    _token, text = services.token_create(user=owner, name="laptop", by=owner)
    services.user_role_set(user=owner, role=Role.VIEWER, by=admin)
    match = selectors.token_user(text)
    assert match is not None and match[0].role == Role.VIEWER


def test_tokens_of_others_are_for_admins(owner: User, teammate: User, admin: User) -> None:
    token, _ = services.token_create(user=owner, name="laptop", by=admin)
    for act in (
        lambda: services.token_create(user=owner, name="x", by=teammate),
        lambda: services.token_revoke(token=token, by=teammate),
        lambda: selectors.token_get(user=teammate, id=token.pk),
    ):
        with pytest.raises(Refusal):
            act()
    assert selectors.token_get(user=owner, id=str(token.pk)) == token
    services.token_revoke(token=token, by=admin)


def test_admins_make_people_and_keep_their_own_role(admin: User, operator: User) -> None:
    made = services.user_create(
        username="new", password="a long enough one", role=Role.ADMIN, by=admin
    )
    assert made.is_superuser and made.check_password("a long enough one")
    for wrong in ({"username": "new"}, {"username": "no good"}, {"username": "x", "role": "king"}):
        with pytest.raises(Refusal):
            services.user_create(by=admin, **wrong)
    with pytest.raises(Refusal):
        services.user_create(username="other", by=operator)
    with pytest.raises(Refusal):
        services.user_role_set(user=admin, role=Role.VIEWER, by=admin)


def test_passwords_follow_the_rules(owner: User) -> None:
    User.objects.filter(pk=owner.pk).update(must_change_password=True)
    owner.refresh_from_db()
    with pytest.raises(Refusal):
        services.password_change(user=owner, password="password")
    services.password_change(user=owner, password="quite another sentence")
    owner.refresh_from_db()
    assert owner.check_password("quite another sentence") and not owner.must_change_password


def test_visibility_of_owners(people: factories.People) -> None:
    assert set(selectors.people_visible_to(user=people.owner)) == {people.owner, people.teammate}
    assert list(selectors.people_visible_to(user=people.stranger)) == [people.stranger]
    assert selectors.visible_owners(people.operator) is None
    services.audit(actor=people.owner, action="x")
    assert not selectors.audit_entries(user=people.teammate).filter(action="x").exists()
    assert selectors.audit_entries(user=people.admin).filter(action="x").exists()


@pytest.mark.django_db
def test_the_token_command_creates_and_prints_once() -> None:
    with pytest.raises(CommandError, match="--create"):
        call_command("token", "ada")
    out = StringIO()
    call_command("token", "ada", "--create", "--role", "operator", "--json", stdout=out)
    result = json.loads(out.getvalue())
    assert (result["username"], result["role"]) == ("ada", "operator")
    match = selectors.token_user(result["token"])
    assert match is not None and "fleet" in match[1].scopes
    out = StringIO()
    call_command("token", "ada", stdout=out)
    assert selectors.token_user(out.getvalue().strip()) is not None
    out = StringIO()
    call_command("token", "ada", "--role", "viewer", "--json", stdout=out)
    assert json.loads(out.getvalue())["role"] == "viewer"


def test_a_token_needs_the_scope_tokens_to_manage_tokens(owner: User) -> None:
    reader = factories.api(owner, scopes=["read", "runs"])
    manager = factories.api(owner, scopes=["read", "tokens"])
    body = {"name": "new", "scopes": ["read"]}
    other, _ = services.token_create(user=owner, name="other", by=owner)
    for client, created, revoked in ((reader, 403, 403), (manager, 201, 204)):
        answer = client.post("/api/v1/tokens", body, "application/json")
        assert answer.status_code == created
        assert client.delete(f"/api/v1/tokens/{other.pk}").status_code == revoked
        assert client.get("/api/v1/tokens").status_code == 200


def test_a_token_creates_none_that_lives_longer(owner: User) -> None:
    soon = timezone.now() + timedelta(minutes=5)
    _, text = services.token_create(user=owner, name="short", expires=soon, by=owner)
    client = Client(headers={"Authorization": f"Bearer {text}"})

    def create(**more: Any) -> Any:
        return client.post("/api/v1/tokens", {"name": "new", **more}, "application/json")

    later = create(expires=(soon + timedelta(minutes=1)).isoformat())
    assert (later.status_code, later.json()["errors"][0]["field"]) == (422, "expires")
    for answer in (create(), create(expires=(soon - timedelta(minutes=1)).isoformat())):
        assert answer.status_code == 201
        assert ApiToken.objects.get(pk=answer.json()["id"]).expires <= soon
