"""One live topic in a web process and its sockets: order, gaps and send queues.

On a gap in the numbers the feed reads the missing frames from the database. `hub` delivers the
others.
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

QUEUE: Final = 256  # queued frames per socket; beyond that it gets one `gap` frame

Send = Callable[[dict[str, Any]], Awaitable[None]]


def _heads(topics: list[str]) -> dict[str, tuple[str, int]]:
    """Heads of the topics, after numbering frames whose process ended before it did."""
    for topic in live.SHARED.intersection(topics):
        live.number_waiting(topic)
    return live.heads(topics)


heads = database_sync_to_async(_heads, thread_sensitive=False)
head_of = database_sync_to_async(live.head, thread_sensitive=False)
frames_after = database_sync_to_async(live.frames_after, thread_sensitive=False)


class Client:
    """One socket of a topic: its send queue and the last number sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._queue: deque[tuple[int, str]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._overflowed = False
        self.sent = 0
        # users whose runs the socket's user may see; None: all, or a topic checked as a whole
        self.owners: frozenset[int] | None = None

    def may_see(self, owner: int | None) -> bool:
        """Whether the socket gets frames about this user's runs; None: frames about no run."""
        return owner is None or self.owners is None or owner in self.owners

    def offer(self, seq: int, text: str) -> None:
        """Queue a frame; called for every frame and socket, so it must be cheap."""
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
        """Send a frame now."""
        await self._send({"type": "websocket.send", "text": text})

    async def skip(self, feed: Feed, to: int) -> None:
        """Send a gap up to `to`: the page refetches its state and continues from there."""
        body = {"from": min(self.sent + 1, to), "to": to}
        await self.send(live.frame_text(feed.epoch, to, "gap", body))
        self.sent = to

    async def pump(self, feed: Feed) -> None:
        """Send queued frames in order, each number once, until cancelled."""
        queue, loop = self._queue, asyncio.get_running_loop()
        while True:
            while queue:
                seq, text = queue.popleft()
                if seq > self.sent:
                    await self._send({"type": "websocket.send", "text": text})
                    self.sent = seq
                elif seq < 0 and -seq > self.sent:  # a heartbeat, see `Hub._send_heartbeats`
                    await self._send({"type": "websocket.send", "text": text})
            if self._overflowed:
                self._overflowed = False
                await self.skip(feed, feed.head)
                continue
            self._waiter = loop.create_future()
            await self._waiter


class Feed:
    """One topic in this process: its clients, and the number up to which they were offered all."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.channel = live_channel(topic)
        self.clients: set[Client] = set()
        self.epoch = ""
        self.head = 0
        self.announced = 0  # highest number seen
        self.ready = asyncio.Event()  # the head is known, or `error`
        self.error: Exception | None = None
        self.subscribed = asyncio.Event()
        self.sync: asyncio.Task[None] | None = None

    def receive(self, epoch: str, seq: int, text: str) -> None:
        """Offer a frame from Redis if it is the next one, else read the database."""
        self.announced = max(self.announced, seq)
        if not self.ready.is_set() or self.sync is not None:
            return
        if epoch == self.epoch and seq == self.head + 1:
            self._offer(seq, text)
        elif epoch != self.epoch or seq > self.head:
            self.catch_up()

    def pass_on(self, text: str) -> None:
        """Offer a frame without number to all who may see it."""
        owner = live.owner_of(text)
        for client in self.clients:
            if client.may_see(owner):
                # a negative number marks a frame outside the sequence
                client.offer(-self.head - 1, text)

    def catch_up(self) -> None:
        """Start reading missing frames from the database, unless already running."""
        if self.sync is None and self.ready.is_set():
            self.sync = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Read and offer missing frames until all announced ones are offered."""
        try:
            while True:
                now = await head_of(self.topic)
                if now.epoch != self.epoch:
                    self._restart(now)
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
            log.exception("could not read live topic %s, retrying in a second", self.topic)
        finally:
            self.sync = None

    def skip_to(self, seq: int) -> None:
        """Offer a gap up to `seq`: frames between are pruned or too many to replay."""
        if seq <= self.head:
            return
        text = live.frame_text(self.epoch, seq, "gap", {"from": self.head + 1, "to": seq})
        self._offer(seq, text)

    def _restart(self, now: live.TopicHead) -> None:
        """Restart at a new epoch: numbers start from 1 and every page refetches."""
        first = self.epoch == ""
        self.epoch, self.head, self.announced = now.epoch, 0, now.seq
        for client in self.clients:
            client.sent = 0
        if first:
            asyncio.get_running_loop().call_soon(self.catch_up)
        else:
            self.skip_to(now.seq)

    def _offer(self, seq: int, text: str) -> None:
        """Offer a frame: one text for all who may see it, one without content for the others."""
        self.head = seq
        owner = live.owner_of(text)
        if owner is None:
            for client in self.clients:
                client.offer(seq, text)
            return
        hidden = hidden_frame(self.epoch, seq)
        for client in self.clients:
            client.offer(seq, text if client.may_see(owner) else hidden)


def hidden_frame(epoch: str, seq: int) -> str:
    """Return the frame for a socket that may not see frame `seq`: it only advances the number."""
    return live.frame_text(epoch, seq, "hidden", "{}")


def heartbeat(feed: Feed) -> str:
    """Return a heartbeat frame with the feed's head."""
    return live.frame_text(feed.epoch, feed.head, "heartbeat", "{}")
