"""A TCP proxy in front of the broker that loses, delays, doubles and reorders messages.

Runs in a thread of its own. A reply that is dropped after the broker handled its request makes the
client send the request again. A doubled message also arrives a second time on a connection of its
own, seconds later, so that it follows newer ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

# what carries messages: reports and telemetry, orders, heartbeats and leases
_MESSAGES = {b"XADD", b"LPUSH", b"EVAL", b"EVALSHA"}
_LOGIN = {b"HELLO", b"AUTH", b"SELECT"}


class Proxy:
    """Forwards `host:port` to the broker; the attributes inject faults while they are set."""

    def __init__(self, broker_port: int, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host, self.port, self._broker_port = host, port, broker_port
        self.delay_s = 0.0  # each chunk of bytes waits up to this long, so connections overtake
        self.double_s = 0.0  # each message arrives again, up to this much later
        self.drop_replies = False
        self.drop_requests = False  # connections stay open, and what is sent on them disappears
        self.doubled = 0  # messages so far
        self._connections: set[asyncio.StreamWriter] = set()
        self._repeats: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._listen())

    def cut(self) -> None:
        """Reset every connection, in the middle of whatever it carries."""
        self._call(self._cut())

    def refuse(self) -> None:
        """Refuse new connections and reset those that are open, until `accept`."""
        self._call(self._refuse())

    def accept(self) -> None:
        """Accept connections again."""
        self._call(self._listen())

    def heal(self) -> None:
        """End all faults; connections that have lost bytes are reset."""
        self.delay_s = self.double_s = 0.0
        self.drop_replies = self.drop_requests = False
        self.accept()

    def close(self) -> None:
        """Stop the proxy and its thread."""
        self._call(self._refuse())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._forward, self.host, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for repeat in self._repeats:
            repeat.cancel()
        await self._cut()

    async def _cut(self) -> None:
        for writer in list(self._connections):
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, upward = await asyncio.open_connection("127.0.0.1", self._broker_port)
        except OSError:
            writer.transport.abort()
            return
        self._connections |= {writer, upward}
        copies = [
            asyncio.ensure_future(self._copy_requests(reader, upward)),
            asyncio.ensure_future(self._copy_replies(upstream, writer)),
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for copy in copies:
            copy.cancel()
        for side in (writer, upward):
            self._connections.discard(side)
            side.transport.abort()

    async def _copy_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        commands = Commands()
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.drop_requests:
                    while self.drop_requests and await reader.read(65536):
                        pass  # the client waits for an answer until its timeout
                    return
                await self._wait()
                for command in commands.feed(data):
                    if self.double_s and command.name in _MESSAGES:
                        self._repeat(commands.login + command.text)
                writer.write(data)
                await writer.drain()

    async def _copy_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._wait()
                if self.drop_replies:
                    return
                writer.write(data)
                await writer.drain()

    async def _wait(self) -> None:
        if self.delay_s:
            await asyncio.sleep(random.uniform(0.0, self.delay_s))

    def _repeat(self, text: bytes) -> None:
        task = asyncio.ensure_future(self._send_again(text, random.uniform(0.0, self.double_s)))
        self._repeats.add(task)
        task.add_done_callback(self._repeats.discard)

    async def _send_again(self, text: bytes, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._broker_port)
            writer.write(text)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(65536), 1.0)
            writer.close()
            self.doubled += 1


class Command:
    """One request of a Redis client: its name in capitals and its bytes."""

    def __init__(self, name: bytes, text: bytes) -> None:
        self.name, self.text = name, text


class Commands:
    """Splits a client's bytes into requests; `login` holds those that authenticated it.

    Requests within a transaction are omitted: alone they mean something else.
    """

    def __init__(self) -> None:
        self.login = b""
        self._rest = b""
        self._in_transaction = False

    def feed(self, data: bytes) -> Iterator[Command]:
        """The requests that are complete now."""
        self._rest += data
        while (request := self._next()) is not None:
            name, length = request
            text, self._rest = self._rest[:length], self._rest[length:]
            if name in _LOGIN:
                self.login += text
            if name in (b"MULTI", b"EXEC", b"DISCARD"):
                self._in_transaction = name == b"MULTI"
            elif not self._in_transaction:
                yield Command(name, text)

    def _next(self) -> tuple[bytes, int] | None:
        """The name and length of the first request: an array of strings, `*2\\r\\n$3\\r\\n…`."""
        header, separator, _ = self._rest.partition(b"\r\n")
        if not separator or not header.startswith(b"*"):
            return None
        at, name = len(header) + 2, b""
        for number in range(int(header[1:])):
            end = self._rest.find(b"\r\n", at)
            if end < 0:
                return None
            start = end + 2
            at = start + int(self._rest[at + 1 : end]) + 2
            if at > len(self._rest):
                return None
            name = name if number else self._rest[start : at - 2].upper()
        return name, at
