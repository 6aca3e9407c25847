"""Random handshakes and messages for the live sockets: no consumer fails, and none is left over.

`make test` sends a few; ORRERY_TEST_MATRIX=full and `make fuzz` 20,000. ORRERY_FUZZ_SEED chooses
others, ORRERY_FUZZ_MUTATIONS another number.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import connections

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import live
from orchestrator.common import redis as common_redis
from orchestrator.config.asgi import application
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.fuzz.mutations import as_json, damaged, mutated
from tests.webui.socket_client import PATIENCE_S, SocketClient
from webui.live.hub import hub

SEED = int(os.environ.get("ORRERY_FUZZ_SEED", "7"))
MESSAGES = 9  # of a socket, after its handshake
LONG = 20_000
MUTATIONS = int(os.environ.get("ORRERY_FUZZ_MUTATIONS", LONG if FULL else 600))
SOCKETS = min(MUTATIONS, LONG) // (MESSAGES + 1)
AT_ONCE = 20
FLOOD = 100  # sockets of one topic at once
CLOSE_CODES = {1000, 1008, 1011, 4400, 4401, 4403, 4404}
QUERIES = [
    "",
    "after=0",
    "after=-1",
    "after=99999999999999999999",
    f"after={'9' * 5000}",
    "after=" + "%F0%9F%AA%90" * 40,
    "after=%D9%A1",  # a digit, but no ASCII
    "after=x&epoch=%00",
    "after=1&after=x&epoch=" + "e" * 3000,
    "&=",
    "a&" * 3000,
]


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(5400)
def test_odd_sockets_are_refused_or_served(
    owner: User, redis_url: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = redis_url
    common_redis.reset()
    # the threads that read for sockets end with the test
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    run = factories.external_run(owner)
    _, token = accounts.token_create(user=owner, name="fuzz", by=owner)
    outcomes = asyncio.run(open_all(run.pk, token))
    assert outcomes["served"] > 0 and outcomes["refused"] > 0, outcomes
    common_redis.reset()


async def open_all(run: int, token: str) -> Counter[str]:
    chance = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    for start in range(0, SOCKETS, AT_ONCE):
        group = [handshake(run, token, chance) for _ in range(min(AT_ONCE, SOCKETS - start))]
        seeds = [chance.random() for _ in group]
        opened = (
            open_one(path, headers, random.Random(seed))
            for (path, headers), seed in zip(group, seeds, strict=True)
        )
        outcomes.update(await asyncio.gather(*opened))
    assert hub()._feeds == {} and hub()._tasks == []
    await flood(run, token)
    assert hub()._feeds == {} and hub()._tasks == []
    return outcomes


def handshake(run: int, token: str, chance: random.Random) -> tuple[str, list[tuple[bytes, bytes]]]:
    """A path with its query, and headers."""
    path = chance.choice([f"/ws/runs/{run}/", "/ws/fleet/", f"/ws/runs/{run}/".upper()])
    query = chance.choice(QUERIES)
    bearer = f"Bearer {token}".encode()
    headers = [(b"authorization", bearer), (b"origin", b"http://localhost")]
    if chance.random() < 0.3:
        path = damaged(path.encode(), chance).decode("latin-1") or "/"
    if chance.random() < 0.2:
        query = damaged(b"after=3&epoch=abc", chance).decode("latin-1")
    if chance.random() < 0.2:
        headers = [(name, damaged(value, chance)) for name, value in headers]
    if chance.random() < 0.1:
        headers += [(b"cookie", damaged(b"sessionid=abc; csrftoken=x", chance))] * 3
    return "/" + path.lstrip("/") + "?" + query, headers


async def open_one(path: str, headers: list[tuple[bytes, bytes]], chance: random.Random) -> str:
    """Open, send odd messages, and leave; whether it was served."""
    try:
        socket = SocketClient(application, path, headers)
    except (ValueError, UnicodeError):
        return "refused"  # no server passes such a path on
    if not await socket.connect():
        return "refused"
    first = await socket.receive_output(PATIENCE_S)
    if first["type"] == "websocket.close":
        assert first["code"] in CLOSE_CODES, first
        # a longer reason is no control frame: servers fail on it
        assert len((first.get("reason") or "").encode()) <= 123, first
        await socket.disconnect()
        return "refused"
    for _ in range(MESSAGES):
        await socket.send_input(message(chance))
    await socket.disconnect()
    return "served"


def message(chance: random.Random) -> dict[str, Any]:
    """A message of a client as a server passes it on: a text or bytes, of any content."""
    subscribe = {"type": "subscribe", "topics": ["fleet", "run:1"], "after": 3}
    text = as_json(mutated(subscribe, chance))
    kind = chance.random()
    if kind < 0.05:
        text *= 2**20 // (len(text) + 1)
    if kind < 0.4:
        data = damaged(text.encode("utf-8", "surrogatepass"), chance)
        return {"type": "websocket.receive", "bytes": data}
    if kind < 0.5:
        return {"type": "websocket.receive", "bytes": None, "text": text}
    return {"type": "websocket.receive", "text": text}


async def flood(run: int, token: str) -> None:
    """Many sockets join and leave one topic at once; one that stays gets the next frame."""
    headers = [(b"authorization", f"Bearer {token}".encode())]
    path = f"/ws/runs/{run}/"
    stays = SocketClient(application, path, headers)
    assert await stays.connect()
    await stays.text()
    others = [SocketClient(application, path, headers) for _ in range(FLOOD)]
    assert all(await asyncio.gather(*(socket.connect() for socket in others)))
    assert len(hub()._feeds[f"run:{run}"].clients) <= FLOOD + 1
    await asyncio.gather(*(socket.disconnect() for socket in others))
    await database_sync_to_async(live.append)(f"run:{run}", "event", {"n": 1})
    while json.loads(await stays.text())["type"] != "event":
        pass
    await stays.disconnect()
