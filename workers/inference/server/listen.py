"""A socket and uvicorn on it, in an event loop that somebody else runs and with signals that
somebody else takes.

Knows addresses; knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from workers.contracts.wire.exits import UserError


class Listener(uvicorn.Server):
    """`begin` returns once requests are answered; `end` closes what is left."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=75,
            )
        )
        self._bound = bound
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def begin(self) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[self._bound]))
        while not self.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task

    async def end(self) -> None:
        self.should_exit = True
        if self._task is not None:
            await self._task


def bind(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one. Raises UserError where nobody may listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named TCP, or asyncio leaves Nagle's algorithm on: an answer would wait 40 ms for the client's
    # acknowledgement
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        message = f"nobody can listen on {host} port {port}: {error.strerror or error}"
        raise UserError(
            f"serve: {message}; give an address of this machine and a free port"
        ) from None
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
