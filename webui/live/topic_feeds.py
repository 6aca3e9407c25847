"""One live topic in a web process and the sockets that listen to it: order, gaps and what waits to
be sent.

A number that does not follow the last one makes the feed read what lies between from the database.
Where frames come
from otherwise is `hub`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from channels.db import database_sync_to_async

from orchestrator.common import live
from workers.contracts.wire.names import live_channel

log = logging.getLogger(__name__)

QUEUE: Final = 256  # frames waiting for one socket; more, and it gets one `gap` instead

Send = Callable[[dict[str, Any]], Awaitable[None]]

heads = database_sync_to_async(live.heads, thread_sensitive=False)
head_of = database_sync_to_async(live.head, thread_sensitive=False)
frames_after = database_sync_to_async(live.frames_after, thread_sensitive=False)


class Client:
    """One socket's place in a topic: what waits to be sent, and the number sent last."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: deque[tuple[int, str]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._overflowed = False
        self.sent = 0

    def offer(self, seq: int, text: str) -> None:
        """Takes a frame to send later.

        Called for every frame and socket, so it does next to nothing.
        """
        if self._overflowed:
            return
        if len(self._queue) >= QUEUE:
            self._queue.clear()
            self._overflowed = True
            return
        self._queue.append((seq, text))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def send(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    async def skip(self, feed: Feed, to: int) -> None:
        """Tells that the numbers up to `to` will not come: the page reads its state anew and goes
        on from there.
        """
        body = {"from": min(self.sent + 1, to), "to": to}
        await self.send(live.frame_text(feed.epoch, to, "gap", body))
        self.sent = to

    async def pump(self, feed: Feed) -> None:
        """Sends what is offered, in order, each number once, until cancelled."""
        queue, loop = self._queue, asyncio.get_running_loop()
        while True:
            while queue:
                seq, text = queue.popleft()
                if seq > self.sent:
                    await self._send({"type": "websocket.send", "text": text})
                    self.sent = seq
                elif seq < 0 and -seq > self.sent:  # a heartbeat, see `Hub._beat`
                    await self._send({"type": "websocket.send", "text": text})
            if self._overflowed:
                self._overflowed = False
                await self.skip(feed, feed.head)
                continue
            self._waiter = loop.create_future()
            await self._waiter


class Feed:
    """One topic in this process: who listens, and the number up to which everybody has been offered
    everything.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.channel = live_channel(topic)
        self.clients: set[Client] = set()
        self.epoch = ""
        self.head = 0
        self.announced = 0  # highest number heard of
        self.ready = asyncio.Event()
        self.subscribed = asyncio.Event()
        self.sync: asyncio.Task[None] | None = None

    def hear(self, epoch: str, seq: int, text: str) -> None:
        """A frame from Redis: passed on when it is the next one, else a reason to read the
        database.
        """
        self.announced = max(self.announced, seq)
        if not self.ready.is_set() or self.sync is not None:
            return
        if epoch == self.epoch and seq == self.head + 1:
            self._offer(seq, text)
        elif epoch != self.epoch or seq > self.head:
            self.catch_up()

    def catch_up(self) -> None:
        if self.sync is None and self.ready.is_set():
            self.sync = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Reads and offers what is missing until it has everything that was announced."""
        try:
            while True:
                now = await head_of(self.topic)
                if now.epoch != self.epoch:
                    self._begin_anew(now)
                    return
                rows = await frames_after(self.topic, self.head, live.REPLAY_LIMIT)
                if (
                    not rows
                    or rows[0][0] != self.head + 1
                    or now.seq - self.head > live.REPLAY_LIMIT
                ):
                    self.skip_to(now.seq)
                for seq, text in rows:
                    if seq == self.head + 1:
                        self._offer(seq, text)
                if self.announced <= self.head:
                    return
                if not rows and now.seq <= self.head:
                    self.announced = self.head
                    return
        except Exception:
            log.exception("live topic %s not read, trying again in a second", self.topic)
        finally:
            self.sync = None

    def skip_to(self, seq: int) -> None:
        """What lies between is pruned or too much to replay: everybody gets a gap."""
        if seq <= self.head:
            return
        text = live.frame_text(self.epoch, seq, "gap", {"from": self.head + 1, "to": seq})
        self._offer(seq, text)

    def _begin_anew(self, now: live.Head) -> None:
        """The topic has another epoch: numbers count anew, so every page starts over."""
        first = self.epoch == ""
        self.epoch, self.head, self.announced = now.epoch, 0, now.seq
        for client in self.clients:
            client.sent = 0
        if first:
            asyncio.get_running_loop().call_soon(self.catch_up)
        else:
            self.skip_to(now.seq)

    def _offer(self, seq: int, text: str) -> None:
        self.head = seq
        for client in self.clients:
            client.offer(seq, text)


def heartbeat(feed: Feed) -> str:
    return live.frame_text(feed.epoch, feed.head, "heartbeat", "{}")
