"""Random paths, queries, headers and messages for the live sockets: the server never fails.

ORRERY_TEST_MATRIX=full, as in `make test-all`, opens more sockets.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.common import redis as common_redis
from orchestrator.config.asgi import application
from tests import factories
from tests.matrix import FULL
from tests.orchestrator.fuzz.mutations import damaged
from tests.webui.socket_client import PATIENCE_S, SocketClient

SOCKETS = 3000 if FULL else 60
CLOSE_CODES = {1000, 1008, 1011, 4400, 4401, 4403, 4404}


@pytest.mark.django_db(transaction=True)
def test_odd_sockets_are_refused_or_served(
    owner: User, redis_url: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.REDIS_URL = redis_url
    common_redis.reset()

    run = factories.external_run(owner)
    _, token = accounts.token_create(user=owner, name="fuzz", by=owner)
    outcomes = asyncio.run(open_many(run.pk, token))
    assert outcomes["served"] > 0 and outcomes["refused"] > 0
    common_redis.reset()


async def open_many(run: int, token: str) -> dict[str, int]:
    chance = random.Random(7)
    outcomes = {"served": 0, "refused": 0}
    for _ in range(SOCKETS):
        path = chance.choice([f"/ws/runs/{run}/", "/ws/fleet/", f"/ws/runs/{run}/".upper()])
        query = chance.choice(
            [
                "",
                "?after=0",
                "?after=-1",
                "?after=99999999999999999999",
                "?after=x&epoch=%00",
                "?&=",
            ]
        )
        bearer = f"Bearer {token}".encode()
        headers = [(b"authorization", bearer), (b"origin", b"http://localhost")]
        if chance.random() < 0.5:
            path = damaged(path.encode(), chance).decode("latin-1") or "/"
        if chance.random() < 0.3:
            query = "?" + damaged(b"after=3&epoch=abc", chance).decode("latin-1")
        if chance.random() < 0.3:
            headers = [(name, damaged(value, chance)) for name, value in headers]
        path = "/" + path.lstrip("/")
        outcomes[await open_one(path + query, headers, chance)] += 1
    return outcomes


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
        return "refused"
    for _ in range(3):
        data = damaged(b'{"type":"subscribe","topic":"fleet"}', chance)
        message: dict[str, Any] = {"type": "websocket.receive", "bytes": data}
        if chance.random() < 0.5:
            message = {"type": "websocket.receive", "text": data.decode("latin-1")}
        await socket.send_input(message)
    await socket.disconnect()
    return "served"
