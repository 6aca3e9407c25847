"""Login by an identity provider: a real OpenID Connect provider, groups, refusals, linking."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from django.test import Client

from orchestrator.accounts.models import AuditEntry, Team, User
from orchestrator.accounts.oidc_groups import GroupMapping, MappingError, groups_in
from orchestrator.accounts.roles import Role
from tests import factories

ANN = {
    "preferred_username": "ann",
    "email": "ann@example.org",
    "email_verified": True,
    "groups": ["ml-users", "vision", "other"],
}


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        while server.poll() is None:
            try:
                httpx.get(f"{address}/.well-known/openid-configuration")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield address
        server.terminate()


@pytest.fixture
def login(provider: str, settings: Any, db: None) -> Any:
    """Logs in as a person with these claims; returns the last response."""
    apps = copy.deepcopy(settings.SOCIALACCOUNT_PROVIDERS)
    apps["openid_connect"]["APPS"][0]["settings"]["server_url"] = provider
    apps["openid_connect"]["APPS"][0] |= {"client_id": "orrery", "secret": "hush"}
    settings.SOCIALACCOUNT_PROVIDERS = apps
    settings.ENV = settings.ENV.model_copy(update={"oidc_name": "Lab login"})

    def log_in(sub: str, claims: dict[str, Any], browser: Client | None = None, **env: Any) -> Any:
        if env:
            settings.ENV = settings.ENV.model_copy(update=env)
        browser = browser or Client()
        httpx.put(f"{provider}/users/{sub}", json=claims).raise_for_status()
        started = browser.post("/login/oidc/", {"next": "/runs/"})
        assert started.status_code == 302, started.content
        answer = httpx.post(started["Location"], data={"sub": sub})
        assert answer.status_code == 302, answer.text
        back = urlsplit(answer.headers["location"])
        assert back.path == "/login/oidc/sso/callback/"
        return browser.get(f"{back.path}?{back.query}")

    return log_in


def test_the_first_login_creates_an_account_with_role_and_teams(login: Any) -> None:
    env = {
        "oidc_roles": ("ml-users=submitter", "ml-admins=operator"),
        "oidc_teams": ("vision=Vision lab:operator", "speech=Speech"),
    }
    browser = Client()
    answer = login("1", ANN, browser, **env)
    assert answer.status_code == 302 and answer["Location"] == "/runs/"
    user = User.objects.get(username="ann")
    assert (user.role, user.email) == (Role.SUBMITTER, "ann@example.org")
    assert not user.has_usable_password()
    assert dict(user.memberships.values_list("team__name", "role")) == {"Vision lab": "operator"}
    assert browser.get("/runs/").status_code == 200
    entry = AuditEntry.objects.get(action="login")
    assert entry.actor == user and entry.data == {"by": "Lab login"}

    # the groups decide at every login; teams of other origin stay
    Team.objects.create(name="by hand").members.add(user)
    login("1", {**ANN, "groups": ["ml-admins", "speech"]})
    user = User.objects.get(username="ann")
    assert user.role == Role.OPERATOR
    assert set(user.teams.values_list("name", flat=True)) == {"Speech", "by hand"}
    assert User.objects.count() == 1


def test_without_a_mapping_roles_and_teams_are_set_in_orrery(login: Any, people: Any) -> None:
    login("2", {"email": "bob@example.org"})
    user = User.objects.get(username="bob")
    assert user.role == Role.SUBMITTER and not user.teams.exists()
    User.objects.filter(pk=user.pk).update(role=Role.VIEWER)
    login("2", {"email": "bob@example.org", "groups": ["x"]})
    assert User.objects.get(username="bob").role == Role.VIEWER


def test_a_person_without_a_group_is_refused(login: Any) -> None:
    env = {"oidc_roles": ("ml-users=submitter",), "oidc_default_role": "none"}
    answer = login("3", {**ANN, "groups": ["guests"]}, **env)
    assert answer.status_code == 403
    assert "None of your groups may use Orrery" in answer.content.decode()
    assert not User.objects.exists()
    entry = AuditEntry.objects.get(action="login.refused")
    assert entry.data == {"subject": "3", "groups": ["guests"]}


def test_an_account_of_the_same_name_is_not_taken_over(login: Any, admin: User) -> None:
    login("4", {**ANN, "preferred_username": "Admin", "email": "x@example.org"})
    assert User.objects.get(email="x@example.org").username == "Admin-2"


def test_accounts_are_linked_by_verified_email_on_request(login: Any, owner: User) -> None:
    owner.email = "owner@example.org"
    owner.save()
    claims = {**ANN, "email": "Owner@example.org"}
    login("5", {**claims, "email_verified": False}, oidc_link_by_email=True)
    assert User.objects.get(username="ann").email == ""
    login("6", claims)
    assert owner.socialaccount_set.get().uid == "6"


def test_a_disabled_account_stays_out(login: Any) -> None:
    login("7", ANN)
    User.objects.filter(username="ann").update(is_active=False)
    browser = Client()
    answer = login("7", ANN, browser)
    assert answer.status_code == 403 and "is disabled" in answer.content.decode()
    assert browser.get("/runs/").status_code == 302


def test_a_cancelled_or_forged_answer_does_not_log_in(login: Any, provider: str) -> None:
    browser = Client()
    started = browser.post("/login/oidc/")
    state = httpx.URL(started["Location"]).params["state"]
    answer = browser.get(f"/login/oidc/sso/callback/?error=access_denied&state={state}")
    assert answer.status_code == 400 and "was cancelled" in answer.content.decode()
    for query in ("code=forged&state=forged", f"code=forged&state={state}", ""):
        answer = browser.get(f"/login/oidc/sso/callback/?{query}")
        assert answer.status_code == 400 and "failed" in answer.content.decode(), query
    assert browser.get("/runs/").status_code == 302
    assert browser.get("/login/oidc/").status_code == 405


def test_a_provider_that_is_down_is_named(db: None, settings: Any) -> None:
    settings.ENV = settings.ENV.model_copy(update={"oidc_name": "Lab login"})
    answer = Client().post("/login/oidc/")  # the issuer of the tests' settings does not exist
    assert answer.status_code == 503
    assert "Lab login does not answer" in answer.content.decode()


def test_passwords_may_be_limited_to_administrators(
    db: None, settings: Any, owner: User, admin: User
) -> None:
    settings.ENV = settings.ENV.model_copy(update={"password_login": "admins"})
    for user, status in ((owner, 403), (admin, 302)):
        data = {"username": user.username, "password": factories.PASSWORD}
        assert Client().post("/login/", data).status_code == status


def test_the_policy_of_pages_allows_the_provider(db: None) -> None:
    page = Client().get("/login/")
    assert "form-action 'self' http://127.0.0.1:9;" in page["Content-Security-Policy"]
    assert "Log in with single sign-on" in page.content.decode()


def test_mappings() -> None:
    mapping = GroupMapping.parse(
        ["a=viewer", "cn=b,dc=x=admin"], ["*:viewer", "v=Vision lab:operator"], "none"
    )
    assert mapping.role_of(["a", "cn=b,dc=x"]) == Role.ADMIN
    assert mapping.role_of(["unknown"]) is None
    assert mapping.teams_of(["a", "v", "w"]) == {"Vision lab": "operator", "w": "viewer"}
    assert mapping.managed_teams is None
    for roles, teams, default in (
        (["a"], [], "viewer"),
        (["a=king"], [], "viewer"),
        ([], ["a"], "viewer"),
        ([], ["=x"], "viewer"),
        ([], [], "everybody"),
    ):
        with pytest.raises(MappingError):
            GroupMapping.parse(roles, teams, default)
    assert groups_in({"realm": {"roles": ["x", 1]}}, "realm.roles") == ["x"]
    assert groups_in({"groups": "one"}, "groups") == ["one"] and groups_in({}, "a.b") == []
