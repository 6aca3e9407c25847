"""Live sockets that fail: lost pages, outages of the database, topics without frames."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.config.asgi import application
from tests import factories
from tests.webui.socket_client import PATIENCE_S, Headers, SocketClient
from webui.live import consumers, topic_feeds
from webui.live import hub as hubs
from webui.live.routing import TRY_LATER

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def no_cached_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read for sockets end with the test."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


def bearer(user: User) -> Headers:
    _, text = accounts.token_create(user=user, name="socket", by=user)
    return [(b"authorization", f"Bearer {text}".encode())]


def test_a_socket_that_is_lost_during_the_replay_leaves_the_hub(
    owner: User, live_redis: str
) -> None:
    run, headers = factories.external_run(owner), bearer(owner)
    live.append_many([live.NewFrame(f"run:{run.pk}", "event", {"n": n}) for n in range(3)])
    scope = SocketClient(application, f"/ws/runs/{run.pk}/?after=0", headers).scope

    async def connect() -> None:
        incoming = asyncio.Queue[dict[str, Any]]()
        incoming.put_nowait({"type": "websocket.connect"})
        tasks = list[asyncio.Task[None]]()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "websocket.send":
                tasks.extend(hubs.hub()._tasks)
                assert hubs.hub()._feeds
                raise OSError("the page was closed")

        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(OSError, match="the page was closed"):
                await application(scope, incoming.get, send)
        assert hubs.hub()._feeds == {} and hubs.hub()._tasks == []
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(connect())


async def nowhere(message: dict[str, Any]) -> None:
    raise AssertionError(message)


def test_a_failed_join_fails_for_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their sockets stayed open without frames, or each tried the database in turn."""

    async def join_all() -> None:
        entered, fail, reads = asyncio.Event(), asyncio.Event(), list[str]()

        async def unreadable(topic: str) -> None:
            reads.append(topic)
            entered.set()
            await fail.wait()
            raise DatabaseError("the database is down")

        monkeypatch.setattr(hubs, "head_of", unreadable)
        hub = hubs.Hub()
        clients = [topic_feeds.Client(nowhere) for _ in range(300)]
        joins = [asyncio.create_task(hub.join("fleet", client)) for client in clients]
        await entered.wait()
        await asyncio.sleep(0)
        fail.set()
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*joins, return_exceptions=True)
        assert [type(result) for result in results] == [DatabaseError] * len(clients)
        assert reads == ["fleet"]
        assert hub._feeds == {} and hub._tasks == []

    asyncio.run(join_all())


def test_a_cancelled_join_lets_another_that_waits_for_it_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def join_three() -> None:
        entered, answer = asyncio.Event(), asyncio.Event()

        async def head(topic: str) -> live.TopicHead:
            entered.set()
            await answer.wait()
            return live.TopicHead("e1", 7, 1)

        monkeypatch.setattr(hubs, "head_of", head)
        hub = hubs.Hub()
        clients = [topic_feeds.Client(nowhere) for _ in range(4)]
        joins = [asyncio.create_task(hub.join("fleet", client)) for client in clients]
        await entered.wait()
        await asyncio.sleep(0)
        joins[0].cancel()
        joins[1].cancel()
        await asyncio.sleep(0)
        answer.set()
        async with asyncio.timeout(PATIENCE_S):
            results = await asyncio.gather(*joins, return_exceptions=True)
        assert [type(result) for result in results[:2]] == [asyncio.CancelledError] * 2
        feed = hub._feeds["fleet"]
        assert results[2] is results[3] is feed
        assert feed.head == 7 and feed.clients == {*clients[2:]}
        for client in clients[2:]:
            await hub.leave("fleet", client)
        assert hub._feeds == {} and hub._tasks == []

    asyncio.run(join_three())


def test_a_database_outage_closes_a_new_socket_for_later(
    owner: User, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = bearer(owner)

    def down(*_: Any) -> None:
        raise OperationalError("the database is down")

    monkeypatch.setattr(
        consumers, "owners_visible_to", database_sync_to_async(down, thread_sensitive=False)
    )

    async def connect() -> None:
        socket = SocketClient(application, "/ws/fleet/", headers)
        assert await socket.connect()
        answer = await socket.receive_output(PATIENCE_S)
        assert (answer["type"], answer["code"]) == ("websocket.close", TRY_LATER)
        await socket.wait(PATIENCE_S)

    asyncio.run(connect())


@pytest.mark.parametrize("error", [OperationalError, InterfaceError])
def test_a_recheck_survives_an_outage(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg reports a lost connection as either error."""
    closed: list[int] = []
    answers = iter([error("the connection is closed"), None])

    async def user(*, recheck: bool) -> None:
        if isinstance(answer := next(answers), Exception):
            raise answer

    async def close(code: int, reason: str) -> None:
        closed.append(code)

    monkeypatch.setattr(consumers, "RECHECK_S", 0.001)
    consumer = consumers.FleetConsumer()
    monkeypatch.setattr(consumer, "_user", user)
    monkeypatch.setattr(consumer, "close", close)
    asyncio.run(asyncio.wait_for(consumer._watch(), PATIENCE_S))
    assert closed == [consumers.NOT_LOGGED_IN]


def test_a_topic_without_frames_has_heartbeats(
    owner: User, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a page of a new installation took its connection for dead."""
    monkeypatch.setattr(hubs, "HEARTBEAT_S", 0.01)
    headers = bearer(owner)

    async def connect() -> list[dict[str, Any]]:
        socket = SocketClient(application, "/ws/fleet/?after=0", headers)
        assert await socket.connect()
        beats = [json.loads(await socket.text()) for _ in range(3)]
        await database_sync_to_async(live.append)("fleet", "event", {"n": 1})
        while (frame := json.loads(await socket.text()))["type"] == "heartbeat":
            pass
        await socket.disconnect()
        return [*beats, frame]

    *beats, first = asyncio.run(connect())
    assert [(beat["type"], beat["epoch"], beat["seq"]) for beat in beats] == [
        ("heartbeat", "", 0)
    ] * 3
    assert (first["type"], first["seq"]) == ("event", 1)
