"""The command line against Django's own handler, in this process: no server, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from django.core import signals
from django.core.handlers.wsgi import WSGIHandler
from django.db import close_old_connections
from orrery_cli import client, credentials, main

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User

URL = "http://orrery.test"


@dataclass(frozen=True)
class Shown:
    """What a command has written, and its exit code."""

    code: int
    out: str
    err: str


Orrery = Callable[..., Shown]


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of settings, a short timeout, and no pauses between tries."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("ORRERY_URL", "ORRERY_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(client, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(credentials, "chosen_url", None)


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Orrery:
    """Runs `orrery` with arguments; in this process."""

    def run(*arguments: object) -> Shown:
        capsys.readouterr()
        code = main.run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return Shown(code, shown.out, shown.err)

    return run


@pytest.fixture(autouse=True)
def one_connection() -> Iterator[None]:
    """Requests use the test's database connection, as with Django's test client."""
    ends = (signals.request_started, signals.request_finished)
    connected = [signal for signal in ends if signal.disconnect(close_old_connections)]
    yield
    for signal in connected:
        signal.connect(close_old_connections)


@pytest.fixture
def orrery(
    owner: User, settings: object, monkeypatch: pytest.MonkeyPatch, run_command: Orrery
) -> Orrery:
    """`orrery` with a token of `owner`, connected to this process's Django."""
    settings.ALLOWED_HOSTS = ["orrery.test"]  # type: ignore[attr-defined]
    _, token = accounts.token_create(user=owner, name="cli", by=owner)
    monkeypatch.setattr(client, "TRANSPORT", httpx.WSGITransport(app=WSGIHandler()))
    monkeypatch.setenv("ORRERY_URL", URL)
    monkeypatch.setenv("ORRERY_TOKEN", token)
    return run_command
