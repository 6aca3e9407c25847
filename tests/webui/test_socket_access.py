"""Whose frames a live socket gets: by team, token scope, origin and path."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.db import database_sync_to_async
from django.db import connections, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.config.asgi import application
from orchestrator.runs import events, live_frames
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from tests.webui.socket_client import PATIENCE_S, Headers, SocketClient
from webui.live import routing

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def no_cached_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read for sockets end with the test."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


def bearer(user: User, scopes: list[str] | None = None) -> Headers:
    _, text = accounts.token_create(user=user, name="socket", scopes=scopes, by=user)
    return [(b"authorization", f"Bearer {text}".encode())]


def session(user: User) -> Headers:
    cookie = factories.client_for(user).cookies["sessionid"].value
    return [(b"cookie", f"sessionid={cookie}".encode())]


async def code_of(path: str, headers: Headers) -> int | None:
    """The close code of a refused socket, 0 for a refused handshake, None for an open one."""
    socket = SocketClient(application, path, headers)
    await socket.send_input({"type": "websocket.connect"})
    answer = await socket.receive_output(PATIENCE_S)
    if answer["type"] == "websocket.close":
        await socket.wait(PATIENCE_S)
        return 0
    answer = await socket.receive_output(PATIENCE_S)
    await socket.disconnect()
    return int(answer["code"]) if answer["type"] == "websocket.close" else None


async def frames_until(socket: SocketClient, last: int) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1].get("seq", 0) < last:
        frame = json.loads(await socket.text())
        if frame["type"] != "heartbeat":
            frames.append(frame)
    return frames


def publish(run: Run) -> int:
    """Every kind of `fleet` frame about a run, and one about none; the last number."""
    with transaction.atomic():
        live_frames.run_state(run)
    events.record(run=run, new=[events.NewEvent("note", {"secret": "weights"})])
    telemetry.progress_publish({run.pk: {"loss": 0.125}})
    with transaction.atomic():
        live.append("fleet", "event", {"run": str(run.pk), "secret": "no owner"})
        live.append("fleet", "node", {"node": "n1", "health": "up", "drained": False})
    return live.head("fleet").seq


@pytest.mark.parametrize("replayed", [False, True])
def test_the_fleet_socket_shows_only_visible_runs(
    owner: User, teammate: User, stranger: User, operator: User, live_redis: str, replayed: bool
) -> None:
    run = factories.external_run(owner, name="confidential-name")
    start = live.head("fleet").seq
    sees = {"owner": owner, "teammate": teammate, "operator": operator}
    headers = {name: session(user) for name, user in {**sees, "stranger": stranger}.items()}

    async def collect() -> dict[str, list[dict[str, Any]]]:
        path, last = f"/ws/fleet/?after={start}", 0
        sockets = {name: SocketClient(application, path, head) for name, head in headers.items()}
        if replayed:
            last = await database_sync_to_async(publish)(run)
        for socket in sockets.values():
            assert await socket.connect()
            if not replayed:
                assert json.loads(await socket.text())["type"] == "heartbeat"
        if not replayed:
            last = await database_sync_to_async(publish)(run)
        got = {name: await frames_until(socket, last) for name, socket in sockets.items()}
        for socket in sockets.values():
            await socket.disconnect()
        return got

    got = asyncio.run(collect())
    numbers = [frame["seq"] for frame in got["owner"] if "seq" in frame]
    assert numbers == list(range(start + 1, start + 1 + len(numbers)))
    for name in sees:
        kinds = [frame["type"] for frame in got[name]]
        assert {"state", "event", "node"} <= set(kinds), name
        assert replayed or "progress" in kinds, "readings are not replayed"
        assert "confidential-name" in json.dumps(got[name])
    assert "no owner" in json.dumps(got["operator"])
    assert "no owner" not in json.dumps(got["owner"])
    # the stranger gets the same numbers, so no gap, and nothing about the run
    assert [frame["seq"] for frame in got["stranger"]] == numbers
    assert {frame["type"] for frame in got["stranger"]} == {"hidden", "node"}
    for text in ("confidential-name", "weights", "0.125", '"run"'):
        assert text not in json.dumps(got["stranger"])


def test_a_socket_needs_the_scope_read(owner: User, live_redis: str) -> None:
    run = factories.external_run(owner)
    paths = (f"/ws/runs/{run.pk}/", "/ws/fleet/")
    # a new socket needs its own rows here; the last pattern refuses unknown paths
    assert len(routing.urlpatterns) == len(paths) + 1
    tokens = {name: bearer(owner, [name] if name else []) for name in ("", "runs", "read")}

    async def collect() -> dict[str, list[int | None]]:
        return {
            name: [await code_of(path, head) for path in paths] for name, head in tokens.items()
        }

    assert asyncio.run(collect()) == {"": [4403, 4403], "runs": [4403, 4403], "read": [None, None]}


def test_an_unknown_path_is_a_refused_handshake(
    live_redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def collect() -> list[int | None]:
        paths = ("/ws/", "/ws/other/", "/ws/runs/1/x/", "/", "/ws/%0a/", "/ws/\n", "//ws/fleet/")
        return [await code_of(path, []) for path in paths]

    with caplog.at_level(logging.WARNING):
        assert set(asyncio.run(collect())) == {0}
    assert not caplog.records


def test_the_origin_includes_the_port(owner: User, live_redis: str, settings: Any) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["https://proxy.example"]
    run = factories.external_run(owner)
    cookie = session(owner)
    origins = {
        "http://localhost": None,
        "http://localhost:80": None,
        "https://proxy.example": None,
        "http://localhost:9000": 0,
        "http://127.0.0.1": 0,
        "http://evil.example": 0,
        "http://localhost:port": 0,
        "null": 0,
    }

    async def collect() -> dict[str, int | None]:
        return {
            origin: await code_of(f"/ws/runs/{run.pk}/", [*cookie, (b"origin", origin.encode())])
            for origin in origins
        }

    assert asyncio.run(collect()) == origins


async def next_kind(socket: SocketClient, run: Run) -> str:
    """The type of the first numbered frame; others may overtake it."""
    frames = await frames_until(socket, await database_sync_to_async(publish)(run))
    return next(str(frame["type"]) for frame in frames if "seq" in frame)


def test_new_rights_apply_to_an_open_socket(
    owner: User, teammate: User, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webui.live.consumers.RECHECK_S", 0.05)
    run = factories.external_run(owner)
    headers = session(teammate)

    async def collect() -> list[str]:
        socket = SocketClient(application, "/ws/fleet/", headers)
        assert await socket.connect()
        assert json.loads(await socket.text())["type"] == "heartbeat"
        kinds = [await next_kind(socket, run)]
        await sync_to_async(teammate.teams.clear)()
        async with asyncio.timeout(PATIENCE_S):
            while kinds[-1] != "hidden":
                await asyncio.sleep(0.05)
                kinds.append(await next_kind(socket, run))
        await socket.disconnect()
        return kinds

    kinds = asyncio.run(collect())
    assert kinds[0] == "state"
    assert kinds[-1] == "hidden"
