"""Login, password, tokens, users, audit log and settings pages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.test import Client

from orchestrator.accounts.models import ApiToken, AuditEntry, User
from tests import factories
from webui import login_throttle

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _no_failures_yet() -> Iterator[None]:
    login_throttle.forget()
    yield
    login_throttle.forget()


def log_in(
    client: Client, name: str = "owner", password: str = factories.PASSWORD, **more: str
) -> Any:
    return client.post("/login/", {"username": name, "password": password, **more})


def test_logging_in_leads_where_one_wanted_to_go_but_not_elsewhere(owner: User) -> None:
    assert log_in(Client(), next="/queue/").headers["Location"] == "/queue/"
    assert log_in(Client(), next="https://elsewhere.example/").headers["Location"] == "/"
    assert log_in(Client(), next="//elsewhere.example/").headers["Location"] == "/"
    assert AuditEntry.objects.filter(action="login", actor=owner).count() == 3
    assert (
        Client(enforce_csrf_checks=True).post("/login/", {"username": "owner"}).status_code == 403
    )


def test_a_wrong_login_does_not_reveal_which_part_is_wrong(owner: User) -> None:
    answers = [log_in(Client(), "owner", "wrong"), log_in(Client(), "absent", "wrong")]
    for answer in answers:
        assert (
            answer.status_code == 403
            and "Name and password do not match" in answer.content.decode()
        )
    assert AuditEntry.objects.filter(action="login.refused").count() == 2


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes the time window, however long the attempts take."""
    now = login_throttle._window()
    monkeypatch.setattr(login_throttle, "_window", lambda: now)


@pytest.mark.usefixtures("one_window")
def test_too_many_wrong_passwords_block_the_login_for_a_while(owner: User, teammate: User) -> None:
    client = Client()
    for _ in range(login_throttle.PER_NAME):
        assert log_in(client, password="wrong").status_code == 403
    closed = log_in(client)  # even the right one
    assert closed.status_code == 429 and int(closed.headers["Retry-After"]) > 0
    assert "Wait" in closed.content.decode()
    assert log_in(Client(), "teammate").status_code == 302
    # failures from another address do not lock the user out
    assert log_in(Client(REMOTE_ADDR="10.1.2.3")).status_code == 302


@pytest.mark.usefixtures("one_window")
def test_the_counts_are_shared_by_all_web_processes(owner: User, live_redis: str) -> None:
    # all tests share this Redis, so the failures come from another address
    there = {"REMOTE_ADDR": "10.4.5.6"}
    for _ in range(login_throttle.PER_NAME):
        log_in(Client(**there), password="wrong")
    login_throttle.forget()  # like a new process
    assert log_in(Client(**there)).status_code == 429


def test_the_first_password_is_hinted_at_until_it_is_replaced(owner: User) -> None:
    first = settings.ENV.home / "first-login"
    assert "First time here?" not in Client().get("/login/").content.decode()
    first.write_text("owner secret\n")
    assert "First time here?" in Client().get("/login/").content.decode()
    owner.must_change_password = True
    owner.save()
    client = Client()
    assert log_in(client).status_code == 302
    assert "Choose your own" in client.get("/account/").content.decode()
    new = "an even longer password"
    for typed, status in (
        ({"new_password1": "short", "new_password2": "short"}, 422),
        ({"new_password1": new, "new_password2": "another"}, 422),
        ({"new_password1": new, "new_password2": new}, 302),
    ):
        answer = client.post("/account/password/", {"old_password": factories.PASSWORD, **typed})
        assert answer.status_code == status
    owner.refresh_from_db()
    assert not owner.must_change_password and owner.check_password(new) and not first.exists()
    assert client.get("/account/").status_code == 200  # this session lives on
    assert log_in(Client(), password=factories.PASSWORD).status_code == 403


def test_logging_out_takes_a_post(owner: User) -> None:
    client = factories.client_for(owner)
    assert client.get("/logout/").status_code == 405
    assert client.post("/logout/").headers["Location"] == "/login/"
    assert client.get("/account/").status_code == 302


def test_a_token_is_shown_once_works_and_is_revoked(owner: User) -> None:
    client = factories.client_for(owner)
    answer = client.post("/account/tokens/", {"name": "laptop", "scopes": ["read"], "days": "30"})
    assert "no-store" in answer.headers["Cache-Control"]
    text = re.search(r'<code id="token-text"[^>]*>([^<]+)<', answer.content.decode())
    assert text is not None
    assert text[1] not in client.get("/account/tokens/").content.decode()
    token = ApiToken.objects.get()
    assert token.scopes == ["read"] and token.expires is not None
    program = Client(headers={"Authorization": f"Bearer {text[1]}"})
    assert program.get("/api/v1/me").json()["scopes"] == ["read"]
    stranger = factories.client_for(factories.user("other"))
    assert stranger.post(f"/account/tokens/{token.pk}/revoke/").status_code == 404
    assert program.get("/api/v1/me").status_code == 200
    client.post(f"/account/tokens/{token.pk}/revoke/")
    assert program.get("/api/v1/me").status_code == 401
    assert "No tokens yet" in client.get("/account/tokens/").content.decode()


def test_a_token_reaches_no_further_than_its_owner(owner: User) -> None:
    client = factories.client_for(owner)
    page = client.get("/account/tokens/").content.decode()
    assert 'value="ingest"' in page and 'value="fleet"' not in page
    refused = client.post("/account/tokens/", {"name": "greedy", "scopes": ["read", "admin"]})
    assert (
        refused.status_code == 422
        and "scope admin requires the role admin" in refused.content.decode()
    )
    assert client.post("/account/tokens/", {"name": " ", "scopes": ["read"]}).status_code == 422
    assert not ApiToken.objects.exists()


def test_everyone_audits_themselves_and_admins_everybody(people: factories.People) -> None:
    log_in(Client())
    mine = factories.client_for(people.owner).get("/account/audit/").content.decode()
    assert "<code>login</code>" in mine and "user.create" not in mine
    all_of_it = (
        factories.client_for(people.admin).get("/account/audit/?action=user.").content.decode()
    )
    assert "user.create" in all_of_it and "<code>login</code>" not in all_of_it


def test_the_audit_log_is_searched_and_exported(people: factories.People) -> None:
    log_in(Client())
    admin, rest = factories.client_for(people.admin), factories.api(people.admin)
    for query, shown in (
        ("text=owner", True),
        ("text=OWNER&action=login", True),
        ("action=log", False),  # a whole action, or a kind with its dot
        ("user=owner&since=2020-01-01", True),
        ("until=2020-01-01", False),
    ):
        text = admin.get(f"/account/audit/?{query}").content.decode()
        assert ("<code>login</code>" in text) is shown, query
    refused = admin.get("/account/audit/?since=soon")
    assert refused.status_code == 422 and "is not a day" in refused.content.decode()
    file = admin.get("/account/audit/?format=csv&action=login")
    head, line = file.content.decode().split()[:2]
    assert head == "time,user,action,target,data,ip" and ",owner,login," in line
    assert file["Content-Disposition"] == 'attachment; filename="audit.csv"'
    exported = rest.get("/api/v1/audit/export?action=login&actor=owner")
    assert b"".join(exported.streaming_content).decode() == file.content.decode()  # type: ignore[attr-defined]
    assert rest.get("/api/v1/audit?since=soon").status_code == 422
    assert [row["actor"] for row in rest.get("/api/v1/audit?q=login").json()["items"]] == ["owner"]
    # others export their own entries only
    own = factories.client_for(people.teammate).get("/account/audit/?format=csv").content.decode()
    assert "owner" not in own


def test_admins_add_people_and_set_roles(people: factories.People) -> None:
    client = factories.client_for(people.admin)
    client.post(
        "/account/people/", {"username": "newcomer", "password": "welcome to us", "role": "viewer"}
    )
    newcomer = User.objects.get(username="newcomer")
    assert newcomer.role == "viewer" and newcomer.must_change_password
    taken = client.post(
        "/account/people/", {"username": "owner", "password": "welcome to us", "role": "viewer"}
    )
    assert taken.status_code == 409 and "Choose another name" in taken.content.decode()
    client.post("/account/people/newcomer/role/", {"role": "operator"})
    newcomer.refresh_from_db()
    assert newcomer.role == "operator"
    assert client.post("/account/people/admin/role/", {"role": "viewer"}).status_code == 409
    assert client.post("/account/people/absent/role/", {"role": "viewer"}).status_code == 404
    for person in (people.owner, people.operator):
        other = factories.client_for(person)
        assert other.get("/account/people/").status_code == 403
        assert other.post("/account/people/newcomer/role/", {"role": "admin"}).status_code == 403
    newcomer.refresh_from_db()
    assert newcomer.role == "operator"


def test_settings_are_listed_and_secrets_are_not(people: factories.People) -> None:
    page = html.unescape(
        factories.client_for(people.operator).get("/account/settings/").content.decode()
    )
    for name in (
        "ORRERY_HOME",
        "ORRERY_SECRET_KEY",
        "DATABASE_URL",
        "REDIS_URL",
        "ORRERY_NODE_LOST_S",
    ):
        assert f"<code>{name}</code>" in page
    assert (
        f"{settings.ENV.node_lost_s:g} s" in page and f"{settings.ENV.node_lost_s:.1f}" not in page
    )
    assert settings.ENV.secret_key and settings.ENV.secret_key not in page
    assert factories.client_for(people.owner).get("/account/settings/").status_code == 403


def test_a_refused_subscription_keeps_what_was_entered(owner: User) -> None:
    client = factories.client_for(owner)
    fresh = client.get("/account/notifications/").content.decode()
    assert fresh.count(" checked>") == fresh.count('name="events"') > 5
    typed = {"name": "mine", "channel": "slack", "target": "nonsense", "scope": "team"}
    answer = client.post("/account/notifications/", {**typed, "events": ["run_failed", "alert"]})
    page = html.unescape(answer.content.decode())
    assert answer.status_code == 422
    assert 'value="mine"' in page and 'value="nonsense"' in page
    assert '<option value="slack" selected>' in page and '<option value="team" selected>' in page
    assert page.count(" checked>") == 2
    assert "Use a URL such as https://example.com/hook." in page
