"""A websocket client of the ASGI application without a server (channels' own needs daphne)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from asgiref.testing import ApplicationCommunicator

PATIENCE_S = 90  # against hangs
Headers = list[tuple[bytes, bytes]]


class SocketClient(ApplicationCommunicator):  # type: ignore[misc]
    """One socket on `path`, sending these headers at the handshake."""

    def __init__(self, application: Any, path: str, headers: Headers) -> None:
        parts = urlsplit(path)
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(b"host", b"localhost"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "subprotocols": [],
        }
        super().__init__(application, scope)

    async def connect(self) -> bool:
        """Whether the handshake was accepted."""
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(PATIENCE_S)
        return bool(answer["type"] == "websocket.accept")

    async def text(self) -> str:
        answer = await self.receive_output(PATIENCE_S)
        assert answer["type"] == "websocket.send", answer
        return str(answer["text"])

    async def quiet(self, seconds: float) -> bool:
        """Whether nothing comes but heartbeats, which come by the clock."""
        while not await self.receive_nothing(seconds):
            if '"heartbeat"' not in await self.text():
                return False
        return True

    async def disconnect(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(PATIENCE_S)
