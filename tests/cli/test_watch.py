"""`watch`: exit codes, outages, tokens that expire meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.core.handlers.wsgi import WSGIHandler
from orrery_cli import client, credentials, watching
from orrery_cli.output import sparkline
from orrery_cli.progress import headline

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.runs import services as runs
from tests import factories
from tests.cli.conftest import URL, Orrery, Shown
from tests.conftest import FakeClock


class Script:
    """Actions in the place of pauses: one per pause."""

    def __init__(self, *actions: Callable[[], Any]) -> None:
        self.actions = list(actions)
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        assert self.actions, "the command does not end"
        self.actions.pop(0)()


@pytest.fixture
def watched(
    orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shown]]:
    """Watches a run; each action happens in one pause of the command."""

    def watch(run: Any, *actions: Callable[[], Any], options: tuple[str, ...] = ()) -> Shown:
        script = Script(*actions)
        monkeypatch.setattr(watching.time, "sleep", script.sleep)
        return orrery("watch", run.pk, *options)

    yield watch


def nothing() -> None:
    return None


def test_the_exit_code_is_that_of_the_state(watched: Any, owner: User) -> None:
    run = factories.run(owner, name="waits")
    shown = watched(run, nothing, lambda: runs.run_cancel(run=run, by=owner))
    assert shown.code == 3
    assert "queued: " in shown.out and f"run {run.pk} cancelled" in shown.out

    external = factories.external_run(owner)
    done = watched(
        external,
        lambda: posted(external, "points", {"points": POINTS}),
        lambda: posted(external, "finish", {}),
    )
    assert done.code == 0 and "finished" in done.out and "loss ▁█▅ 2 → 3" in done.out

    failing = factories.external_run(owner)
    broke = {"status": "failed", "reason": "it broke"}
    failed = watched(failing, lambda: posted(failing, "finish", broke))
    assert failed.code == 1
    assert "it broke" in failed.out and f"orrery logs {failing.pk}" in failed.out


POINTS = [
    {"rank": 0, "seq": at, "step": at, "tokens": at, "time": at, "values": {"loss": loss}}
    for at, loss in enumerate([2.0, 4.0, 3.0], 1)
]


def posted(run: Any, path: str, body: dict[str, Any]) -> None:
    with client.Client() as rest:
        rest.post(f"runs/{run.pk}/{path}", body)


def test_json_is_one_document(watched: Any, owner: User) -> None:
    run = factories.run(owner)
    shown = watched(run, lambda: runs.run_cancel(run=run, by=owner), options=("--json",))
    assert json.loads(shown.out)["state"] == "cancelled" and shown.code == 3


class Flaky(httpx.BaseTransport):
    """The server, or an outage while `down` is set."""

    def __init__(self) -> None:
        self.app = httpx.WSGITransport(app=WSGIHandler())
        self.down: Any = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if isinstance(self.down, Exception):
            raise self.down
        return self.down or self.app.handle_request(request)


@pytest.mark.parametrize(
    "outage",
    [
        httpx.ConnectError("Connection refused"),
        httpx.ReadTimeout("timed out"),
        httpx.Response(502, text="Bad Gateway", request=httpx.Request("GET", URL)),
        httpx.Response(429, headers={"Retry-After": "7"}, request=httpx.Request("GET", URL)),
    ],
    ids=["refused", "timeout", "proxy", "limited"],
)
def test_an_outage_does_not_end_a_watch(
    watched: Any, owner: User, monkeypatch: pytest.MonkeyPatch, outage: Any
) -> None:
    run, server = factories.run(owner), Flaky()
    monkeypatch.setattr(client, "TRANSPORT", server)
    monkeypatch.setattr(client, "LONGEST_WAIT_S", 0.0)

    def returns() -> None:
        server.down = None
        runs.run_cancel(run=run, by=owner)

    shown = watched(run, lambda: setattr(server, "down", outage), nothing, nothing, returns)
    assert shown.code == 3
    assert shown.err.count("trying again") == 1 and "answers again" in shown.err

    other = factories.run(owner)
    ended = watched(
        other, lambda: setattr(server, "down", outage), nothing, options=("--patience", "0")
    )
    assert ended.code == 1 and f"orrery watch {other.pk}" in ended.err
    other.refresh_from_db()
    assert other.state == "queued", "the run does not notice"


def test_an_expired_token_ends_a_watch_with_what_to_do(
    watched: Any, owner: User, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    run = factories.run(owner)
    expires = clock.now() + timedelta(hours=1)
    _, short = accounts.token_create(user=owner, name="short", by=owner, expires=expires)
    monkeypatch.setenv("ORRERY_TOKEN", short)
    shown = watched(run, nothing, lambda: clock.advance(7200))
    assert shown.code == 1
    assert "expired" in shown.err and f"orrery watch {run.pk}" in shown.err
    run.refresh_from_db()
    assert run.state == "queued"


def test_a_login_meanwhile_continues_the_watch(
    watched: Any, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = factories.run(owner)
    old, first = accounts.token_create(user=owner, name="first", by=owner)
    _, second = accounts.token_create(user=owner, name="second", by=owner)
    monkeypatch.delenv("ORRERY_TOKEN")
    credentials.store(URL, first)

    def replaced() -> None:
        accounts.token_revoke(token=old, by=owner)
        credentials.store(URL, second)

    shown = watched(run, replaced, lambda: runs.run_cancel(run=run, by=owner))
    assert shown.code == 3, shown.err


def test_submit_and_watch(orrery: Orrery, owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.runs.models import Run

    script = Script(lambda: runs.run_cancel(run=Run.objects.get(), by=owner))
    monkeypatch.setattr(watching.time, "sleep", script.sleep)
    shown = orrery("submit", "--steps", 3, "--watch")
    assert shown.code == 3 and "cancelled" in shown.out


def test_the_display_of_a_terminal(watched: Any, owner: User, monkeypatch: Any) -> None:
    monkeypatch.setattr(watching.sys.stdout, "isatty", lambda: True, raising=False)
    run = factories.external_run(owner, name="live")
    shown = watched(run, nothing, lambda: runs.run_cancel(run=run, by=owner))
    assert shown.code == 3 and "cancelled" in shown.out


def test_lines_describe_a_run() -> None:
    run = {"id": "1", "state": "running", "wait_reason": None}
    summary = {"step": 5, "steps": 10, "loss": 2.34567, "tokens_per_s": 12345.6, "eta_s": 130}
    assert headline({**run, "summary": summary}) == (
        "running: step 5/10, loss 2.346, tokens/s 12.35k, 2m 10s left"
    )
    queued = {**run, "state": "queued", "wait_reason": "waits for 4 devices", "summary": {}}
    assert headline(queued) == "queued: waits for 4 devices"
    assert sparkline([1, 2, 3, "NaN", 8]) == "▁▂▃×█"
    assert len(sparkline(range(1000), 20)) == 20 and sparkline([]) == "" and sparkline([2]) == "▁"
