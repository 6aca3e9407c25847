"""Headers, cookies, file modes and logins that protect an installation."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import AuditEntry, User
from orchestrator.config import private_files, security_headers
from tests import factories
from tests.flows.embedded import ROOT, clean_environ
from webui import login_throttle


@pytest.fixture(autouse=True)
def no_counts() -> None:
    login_throttle.forget()


@pytest.mark.django_db
def test_every_answer_has_the_content_security_policy(client: Client, owner: User) -> None:
    client.force_login(owner)
    for path in ("/", "/login/", "/missing/", "/api/v1/runs", "/api/docs", "/health/", "/metrics"):
        assert client.get(path)["Content-Security-Policy"] == security_headers.POLICY, path
    policy = dict(part.split(" ", 1) for part in security_headers.POLICY.split("; "))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"


@pytest.mark.django_db
def test_the_admin_uses_the_limited_login(client: Client, admin: User, owner: User) -> None:
    def log_in(password: str, name: str = admin.username, **more: Any) -> int:
        form = {"username": name, "password": password, "next": "/admin/"}
        return client.post("/admin/login/", form, follow=True, **more).status_code

    login_throttle.forget()
    first = client.get("/admin/", follow=True)
    assert first.redirect_chain[-1][0] == "/login/?next=%2Fadmin%2F"
    wrong = {"username": admin.username, "password": "wrong", "next": "/admin/"}
    codes = [client.post("/login/", wrong).status_code for _ in range(login_throttle.PER_NAME + 1)]
    assert codes[-1] == 429
    before = AuditEntry.objects.count()
    # the old path checks no password: a right one does not log in, a wrong one is not counted
    assert log_in(factories.PASSWORD) == 200
    assert "_auth_user_id" not in client.session
    assert AuditEntry.objects.count() == before
    login_throttle.forget()
    right = {**wrong, "password": factories.PASSWORD}
    assert client.post("/login/", right, follow=True).redirect_chain[-1][0] == "/admin/"
    assert client.get("/admin/").status_code == 200
    assert factories.client_for(owner).get("/admin/", follow=True).status_code == 403


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("run_as", ["agent", ""])
def test_the_data_directory_and_database_are_private(
    tmp_path: Path, existing: bool, run_as: str
) -> None:
    home = tmp_path / "home"
    if existing:  # as an earlier version left it
        home.mkdir(mode=0o755)
        home.chmod(0o755)
        for name in ("orrery.sqlite3", "orrery.sqlite3-wal"):
            (home / name).touch()
            (home / name).chmod(0o644)
    environ = {**clean_environ(), "ORRERY_HOME": str(home)}
    if run_as:
        environ["ORRERY_RUN_AS"] = run_as
    environ["DJANGO_SETTINGS_MODULE"] = "orchestrator.config.settings"
    code = "import django; django.setup()\nfrom django.db import connection\n"
    code += "connection.cursor().execute('create table t (x)')"
    subprocess.run(
        [sys.executable, "-c", f"import os; os.umask(0o022)\n{code}"],
        env=environ,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    # users of runs pass through the home of a root agent, and cannot list it
    passable = os.geteuid() == 0 and not run_as
    assert stat.S_IMODE(home.stat().st_mode) == (0o711 if passable else 0o700)
    assert stat.S_IMODE((home / "orrery.sqlite3").stat().st_mode) == 0o600
    assert not [
        path for path in home.glob("orrery.sqlite3*") if stat.S_IMODE(path.stat().st_mode) & 0o077
    ]


def test_stricter_modes_stay(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    private_files.restrict(home, home / "missing.sqlite3")
    assert stat.S_IMODE(home.stat().st_mode) == 0o500


@pytest.mark.parametrize("behind", ["1", "0"])
def test_https_only_behind_a_tls_proxy(tmp_path: Path, behind: str) -> None:
    environ = {
        **clean_environ(),
        "ORRERY_HOME": str(tmp_path),
        "ORRERY_BEHIND_HTTPS": behind,
        "DJANGO_SETTINGS_MODULE": "orchestrator.config.settings",
    }
    code = (
        "import django; django.setup()\n"
        "from django.test import RequestFactory\n"
        "from django.conf import settings\n"
        "from django.middleware.security import SecurityMiddleware\n"
        "from django.http import HttpResponse\n"
        "request = RequestFactory().get('/', headers={'X-Forwarded-Proto': 'https'})\n"
        "answer = SecurityMiddleware(lambda request: HttpResponse())(request)\n"
        "print(answer.get('Strict-Transport-Security'), settings.SESSION_COOKIE_SECURE,"
        " settings.CSRF_COOKIE_SECURE)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        cwd=ROOT,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    ).stdout
    wanted = {"1": "max-age=31536000 True True", "0": "None False False"}
    assert output.strip() == wanted[behind]
