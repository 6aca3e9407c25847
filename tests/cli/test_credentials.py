"""Login: which token is used, where it is stored, and what a stranger can read."""

from __future__ import annotations

import json
import stat

import pytest
from orrery_cli import credentials

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import ApiToken, User
from tests import factories
from tests.cli.conftest import URL, Orrery


@pytest.fixture(autouse=True)
def without_token(orrery: Orrery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORRERY_TOKEN")


def test_a_token_is_checked_stored_and_used(
    orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, token = accounts.token_create(user=owner, name="mine", by=owner)
    assert "orrery login" in orrery("runs").err
    refused = orrery("login", "--token", "wrong")
    assert refused.code == 1 and "oken" in refused.err and not credentials.path().exists()
    shown = orrery("login", URL + "/", "--token", token)
    assert shown.code == 0 and "as owner" in shown.out and token not in shown.out
    assert stat.S_IMODE(credentials.path().stat().st_mode) == 0o600
    assert stat.S_IMODE(credentials.path().parent.stat().st_mode) == 0o700
    monkeypatch.delenv("ORRERY_URL")
    assert orrery("runs").code == 0, "the last login's server and token"
    monkeypatch.setenv("ORRERY_TOKEN", "wrong")
    assert orrery("runs").code == 1, "ORRERY_TOKEN takes precedence"
    monkeypatch.delenv("ORRERY_TOKEN")
    assert orrery("logout").code == 0
    assert credentials.token(URL) is None and orrery("runs").code == 1


def test_a_password_creates_a_token(
    orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pipe:
        @staticmethod
        def readline() -> str:
            return f"{factories.PASSWORD}\n"

        @staticmethod
        def isatty() -> bool:
            return False

    monkeypatch.setattr("orrery_cli.commands.login.sys.stdin", Pipe)
    shown = orrery("login", "--username", "owner", "--json")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["username"] == "owner"
    assert ApiToken.objects.filter(user=owner, name__startswith="orrery on ").exists()
    assert orrery("runs").code == 0
    refused = orrery("login", "--username", "stranger2")
    assert refused.code == 1 and "refused the login of stranger2" in refused.err


def test_a_broken_file_is_named(orrery: Orrery) -> None:
    credentials.path().parent.mkdir(parents=True)
    credentials.path().write_text("{")
    refused = orrery("runs")
    assert refused.code == 1 and str(credentials.path()) in refused.err
