"""A socket and uvicorn on it, in an existing event loop and without signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from workers.runtime.exit_codes import UserError


class Listener(uvicorn.Server):
    """`begin` returns once requests are answered; `end` closes open connections."""

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
        """Leave signals to the run."""
        yield

    async def begin(self) -> None:
        """Start serving."""
        self._task = asyncio.create_task(self.serve(sockets=[self._bound]))
        while not self.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task

    async def end(self) -> None:
        """Stop serving."""
        self.should_exit = True
        if self._task is not None:
            await self._task


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with IPPROTO_TCP, or asyncio keeps Nagle's algorithm: an answer would wait 40 ms for the
    # client's acknowledgement
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"serve: cannot listen on {host} port {port}: {error.strerror or error}; give an "
            "address of this machine and a free port"
        ) from None
    return bound


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
