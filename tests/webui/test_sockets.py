"""Live sockets through the ASGI application: access, replay, gaps and Redis failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import connections, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import clock, live
from orchestrator.common import redis as ours
from orchestrator.config.asgi import application
from orchestrator.runs import services as runs
from orchestrator.runs.models import Run
from tests import factories
from tests.redis_server import RedisServer
from tests.webui.socket_client import PATIENCE_S, Headers, SocketClient
from webui.live import consumers, topic_feeds
from webui.live import hub as hubs

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def no_cached_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read for sockets end with the test."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)


def bearer(user: User) -> Headers:
    _, text = accounts.token_create(user=user, name="socket", by=user)
    return [(b"authorization", f"Bearer {text}".encode())]


def session(user: User) -> Headers:
    cookie = factories.client_for(user).cookies["sessionid"].value
    return [(b"cookie", f"sessionid={cookie}".encode())]


@asynccontextmanager
async def opened(path: str, headers: Headers) -> AsyncIterator[SocketClient]:
    socket = SocketClient(application, path, headers)
    assert await socket.connect()
    try:
        yield socket
    finally:
        await socket.disconnect()


async def frame(socket: SocketClient) -> dict[str, Any]:
    """The next one that is not a heartbeat."""
    while True:
        result: dict[str, Any] = json.loads(await socket.text())
        if result["type"] != "heartbeat":
            return result


async def frames(socket: SocketClient, count: int) -> list[int]:
    return [(await frame(socket))["seq"] for _ in range(count)]


@database_sync_to_async
def append(topic: str, *numbers: int) -> None:
    for number in numbers:
        with transaction.atomic():
            assert live.append(topic, "event", {"event": {"n": number}}) == number


async def closed_with(path: str, headers: Headers) -> tuple[int, str]:
    socket = SocketClient(application, path, headers)
    assert await socket.connect()  # a browser shows the close code only of an accepted socket
    close = await socket.receive_output(PATIENCE_S)
    assert close["type"] == "websocket.close"
    await socket.disconnect()
    return close["code"], close["reason"]


def test_who_gets_in(owner: User, teammate: User, stranger: User, live_redis: str) -> None:
    run = factories.external_run(owner)
    path = f"/ws/runs/{run.pk}/"
    refused = {
        "anonymous": (path, []),
        "fleet": ("/ws/fleet/", []),
        "wrong token": (path, [(b"authorization", b"Bearer orr_nonsense")]),
        "stranger": (path, session(stranger)),
        "no such run": ("/ws/runs/999999/", session(owner)),
        "no number": ("/ws/runs/first/", bearer(owner)),
        "no place": (f"{path}?after=soon", session(owner)),
    }
    welcome = [session(owner), bearer(owner), session(teammate)]

    async def collect() -> dict[str, int]:
        for headers in welcome:
            async with opened(path, headers) as socket:
                assert json.loads(await socket.text())["type"] == "heartbeat"
        async with opened("/ws/fleet/", welcome[0]):
            pass
        codes = {}
        for name, (where, headers) in refused.items():
            codes[name], reason = await closed_with(where, headers)
            assert reason
        return codes

    assert asyncio.run(collect()) == {
        "anonymous": 4401,
        "fleet": 4401,
        "wrong token": 4401,
        "stranger": 4404,
        "no such run": 4404,
        "no number": 4404,
        "no place": 4400,
    }


def test_who_may_no_longer_see_is_shown_out(
    owner: User, teammate: User, live_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "RECHECK_S", 0.05)
    get_user, checks = consumers.LiveConsumer._user, list[bool]()

    async def data(self: consumers.LiveConsumer, *, recheck: bool = False) -> Any:
        result = await get_user(self, recheck=recheck)
        checks.append(recheck)
        return result

    monkeypatch.setattr(consumers.LiveConsumer, "_user", data)
    run = factories.external_run(owner)
    token, text = accounts.token_create(user=owner, name="socket", by=owner)
    client = factories.client_for(owner)
    logged_in: Headers = [(b"cookie", f"sessionid={client.cookies['sessionid'].value}".encode())]

    def leave_teams() -> None:
        teammate.teams.clear()

    def revoke() -> None:
        accounts.token_revoke(token=token, by=owner)

    ends = {
        "token": ([(b"authorization", f"Bearer {text}".encode())], revoke),
        "session": (logged_in, client.logout),
        "team": (session(teammate), leave_teams),
    }

    async def collect(headers: Headers, end: Callable[[], object]) -> int:
        checks.clear()
        async with opened(f"/ws/runs/{run.pk}/", headers) as socket:
            assert json.loads(await socket.text())["type"] == "heartbeat"
            # who is asked about a second time was still let in the first
            while checks.count(True) < 2:
                await asyncio.sleep(0.01)
            assert await socket.quiet(0.01)
            await database_sync_to_async(end)()
            while (closed := await socket.receive_output(PATIENCE_S))["type"] == "websocket.send":
                assert json.loads(closed["text"])["type"] == "heartbeat"
            assert closed["type"] == "websocket.close" and closed["reason"]
            return int(closed["code"])

    assert {name: asyncio.run(collect(*each)) for name, each in ends.items()} == {
        "token": 4401,
        "session": 4401,
        "team": 4404,
    }


def test_the_fleet_socket_first_repeats_the_progress_of_active_runs(
    owner: User, stranger: User, live_redis: str
) -> None:
    """A value sent between a page's rendering and its connection is not lost."""
    run, ended, silent = (factories.external_run(owner) for _ in range(3))
    now = clock.now()
    runs.summary_update(run=run, summary={"step": 3, "loss": 2.5}, seen=now)
    runs.summary_update(run=silent, summary={"step": 1}, seen=now - timedelta(hours=1))
    runs.summary_update(run=ended, summary={"step": 9}, seen=now)
    Run.objects.filter(pk=ended.pk).update(state="finished")

    async def progress(headers: Headers) -> list[tuple[str, dict[str, Any]]]:
        result = []
        async with opened("/ws/fleet/", headers) as socket:
            assert json.loads(await socket.text())["type"] == "heartbeat"
            while not await socket.receive_nothing(0.2):
                if (frame := json.loads(await socket.text()))["type"] == "progress":
                    result.append((frame["run"], frame["summary"]))
        return result

    assert asyncio.run(progress(session(owner))) == [(str(run.pk), {"step": 3, "loss": 2.5})]
    assert asyncio.run(progress(session(stranger))) == []


def test_pages_of_other_hosts_are_refused(owner: User, live_redis: str) -> None:
    run, login = factories.external_run(owner), session(owner)

    async def connects(origin: bytes) -> bool:
        socket = SocketClient(application, f"/ws/runs/{run.pk}/", [*login, (b"origin", origin)])
        connected = await socket.connect()
        await socket.disconnect()
        return connected

    async def collect() -> list[bool]:
        return [
            await connects(origin)
            for origin in (b"http://localhost", b"https://evil.example", b"null")
        ]

    assert asyncio.run(collect()) == [True, False, False]


def with_frames(
    owner: User, count: int, talk: Callable[[str, str, Headers], Coroutine[Any, Any, None]]
) -> None:
    """Runs `talk(topic, path, headers)` on a run that has exactly `count` frames."""
    run, headers = factories.external_run(owner), bearer(owner)
    topic = f"run:{run.pk}"
    already = live.head(topic).seq
    live.append_many(
        [live.NewFrame(topic, "event", {"event": {"n": n}}) for n in range(already + 1, count + 1)]
    )
    asyncio.run(talk(topic, f"/ws/runs/{run.pk}/", headers))


def test_what_was_missed_and_then_what_comes(owner: User, live_redis: str) -> None:
    async def talk(topic: str, path: str, headers: Headers) -> None:
        epoch = (await topic_feeds.head_of(topic)).epoch
        async with (
            opened(f"{path}?after=4&epoch={epoch}", headers) as late,
            opened(path, headers) as fresh,
        ):
            # without `after`: from now on
            assert json.loads(await fresh.text())["type"] == "heartbeat"
            assert await frames(late, 6) == [5, 6, 7, 8, 9, 10]
            await append(topic, 11, 12, 13)
            assert await frames(late, 3) == await frames(fresh, 3) == [11, 12, 13]
        async with opened(f"{path}?after=13", headers) as back:
            await append(topic, 14)
            assert await frames(back, 1) == [14]

    with_frames(owner, 10, talk)


def test_too_far_back_or_of_another_epoch_is_a_gap(owner: User, live_redis: str) -> None:
    async def talk(topic: str, path: str, headers: Headers) -> None:
        async def first(query: str) -> tuple[str, int, int, int]:
            async with opened(path + query, headers) as socket:
                result = await frame(socket)
                return result["type"], result["seq"], result["from"], result["to"]

        assert await first("?after=5&epoch=other") == ("gap", 2010, 1, 2010)
        assert await first("?after=3000") == ("gap", 2010, 1, 2010)
        assert await first("?after=5") == ("gap", 2010, 6, 2010)
        async with opened(f"{path}?after=10", headers) as socket:
            assert await frames(socket, 2000) == list(range(11, 2011))
        await database_sync_to_async(live.prune)(before=clock.now() + timedelta(seconds=1))
        assert await first("?after=2005") == ("gap", 2010, 2006, 2010)

    with_frames(owner, 2010, talk)


@pytest.fixture
def mortal_redis(tmp_path_factory: pytest.TempPathFactory, settings: Any) -> Iterator[RedisServer]:
    import shutil
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="orrery-redis-"))
    server = RedisServer(directory).start()
    settings.REDIS_URL = server.url
    ours.reset()
    yield server
    server.stop()
    ours.reset()
    shutil.rmtree(directory, ignore_errors=True)


def test_redis_may_die_and_come_back(owner: User, mortal_redis: RedisServer) -> None:
    async def talk(topic: str, path: str, headers: Headers) -> None:
        async with opened(f"{path}?after=3", headers) as socket:
            await append(topic, 4)
            assert await frames(socket, 1) == [4]
            mortal_redis.kill()
            await append(topic, 5, 6)
            assert await frames(socket, 2) == [5, 6]
            mortal_redis.start()
            await append(topic, *range(7, 20))
            assert await frames(socket, 13) == list(range(7, 20))
            assert await socket.quiet(1.2)

    with_frames(owner, 3, talk)


def test_a_socket_that_is_too_slow_gets_one_gap() -> None:
    async def talk() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        gate = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            await gate.wait()
            sent.append(json.loads(message["text"]))

        client, feed = topic_feeds.Client(send), topic_feeds.Feed("run:1")
        feed.epoch = "e1"
        feed.clients.add(client)
        pump = asyncio.create_task(client.pump(feed))
        for seq in range(1, 1000):
            feed._offer(seq, live.frame_text("e1", seq, "event", {}))
            if seq == 1:
                await asyncio.sleep(0)  # the first is on its way when the gate is found shut
        gate.set()
        for wanted in (2, 3):
            while len(sent) < wanted:
                await asyncio.sleep(0)
            if wanted == 2:
                feed._offer(1000, live.frame_text("e1", 1000, "event", {}))
        pump.cancel()
        return sent

    sent = asyncio.run(talk())
    assert [(frame["type"], frame["seq"]) for frame in sent] == [
        ("event", 1),
        ("gap", 999),
        ("event", 1000),
    ]
    assert (sent[1]["from"], sent[1]["to"]) == (2, 999)


def test_published_out_of_order_and_never_published(owner: User, live_redis: str) -> None:
    async def talk(topic: str, path: str, headers: Headers) -> None:
        async with opened(f"{path}?after=3", headers) as socket:
            await socket.text()
            feed = hubs.hub()._feeds[topic]
            rows = await database_sync_to_async(_unpublished)(topic)
            for seq, text in (rows[1], rows[0], rows[1]):
                feed.receive(feed.epoch, seq, text)
            assert await frames(socket, 2) == [4, 5]
            await database_sync_to_async(_unpublished)(topic)
            assert await frames(socket, 2) == [6, 7]  # the look at the heads finds them
            assert await socket.quiet(1.2)
        assert hubs.hub()._feeds == {}
        assert hubs.hub()._tasks == []

    with_frames(owner, 3, talk)


def _unpublished(topic: str) -> list[tuple[int, str]]:
    """Two new frames, as if the process had died between commit and publish."""
    before = live.head(topic).seq
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live, "_publish", lambda frames: None)
        live.append_many([live.NewFrame(topic, "event", {}) for _ in range(2)])
    return live.frames_after(topic, before)
