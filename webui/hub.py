"""Fan-out of live frames inside one web process: one Redis subscription a topic, frames sent on as the text they are.

Frames reach every socket in order and once: a number that does not follow the last one makes the hub read what lies
between from the database, and so does a look at the topics' heads every second, so nothing hangs on Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import redis.asyncio
from channels.db import database_sync_to_async
from django.conf import settings

from orchestrator.common import live
from workers.contracts.wire import live_channel

log = logging.getLogger(__name__)

QUEUE: Final = 256  # frames waiting for one socket; more, and it gets one `gap` instead
HEARTBEAT_S: Final = 5.0
_LOOK_S: Final = 1.0  # between looks at the heads in the database; it is the only way while Redis is away
_LOOK_ALONE_S: Final = 0.25
_ALL_FRAMES: Final = "orrery:live:"  # an empty topic, so that the subscription is never empty
_SEQ: Final = re.compile(r'\{"epoch":"([^"]*)","seq":(\d+),')

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
        """Takes a frame to send later. Called for every frame and socket, so it does next to nothing."""
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
        """Tells that the numbers up to `to` will not come: the page reads its state anew and goes on from there."""
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
    """One topic in this process: who listens, and the number up to which everybody has been offered everything."""

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
        """A frame from Redis: passed on when it is the next one, else a reason to read the database."""
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
                if not rows or rows[0][0] != self.head + 1 or now.seq - self.head > live.REPLAY_LIMIT:
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


class Hub:
    """All topics that sockets of this process and event loop listen to. Works while there are any."""

    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pubsub: Any = None
        self._connected = False

    async def join(self, topic: str, client: Client) -> Feed:
        """Adds the socket; from now on it is offered every frame above the feed's `head`."""
        feed = self._feeds.get(topic)
        if feed is not None:
            feed.clients.add(client)
            await feed.ready.wait()
            return feed
        feed = self._feeds[topic] = Feed(topic)
        feed.clients.add(client)
        if not self._tasks:
            self._connected = False
            self._tasks = [asyncio.create_task(work()) for work in (self._listen, self._look, self._beat)]
        if self._connected:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._pubsub.subscribe(feed.channel)
                async with asyncio.timeout(1.0):  # without it the look at the heads comes to the same
                    await feed.subscribed.wait()
        try:
            now = await head_of(topic)
        except BaseException:
            self._feeds.pop(topic, None)
            raise
        feed.epoch, feed.head = now.epoch, now.seq
        feed.ready.set()
        if feed.announced > feed.head:
            feed.catch_up()
        return feed

    async def leave(self, topic: str, client: Client) -> None:
        feed = self._feeds.get(topic)
        if feed is None:
            return
        feed.clients.discard(client)
        if feed.clients:
            return
        del self._feeds[topic]
        if feed.sync is not None:
            feed.sync.cancel()
        if not self._feeds:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
        elif self._connected:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._pubsub.unsubscribe(feed.channel)

    async def _listen(self) -> None:
        """Redis to feeds. After a loss it subscribes anew and reads what it has missed."""
        own = asyncio.current_task()
        while own in self._tasks:
            connection = redis.asyncio.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=2.0)
            try:
                self._pubsub = connection.pubsub()
                await self._pubsub.subscribe(_ALL_FRAMES, *(feed.channel for feed in self._feeds.values()))
                self._connected = True
                if left_out := {feed.channel for feed in self._feeds.values()} - {*_names(self._pubsub.channels)}:
                    await self._pubsub.subscribe(*left_out)  # joined meanwhile
                for feed in self._feeds.values():
                    feed.catch_up()
                while own in self._tasks:  # redis-py swallows a cancellation that comes while it connects
                    message = await self._pubsub.get_message(timeout=_LOOK_S)
                    if message is not None:
                        self._hear(message)
            except (redis.RedisError, OSError, RuntimeError) as error:
                if self._connected:
                    log.warning("live frames come from the database until Redis is back: %s", error)
                self._connected = False
            finally:
                if own in self._tasks:
                    self._connected = False
                with contextlib.suppress(Exception):
                    await connection.aclose()
            await asyncio.sleep(0.5)

    def _hear(self, message: dict[str, Any]) -> None:
        topic = message["channel"].decode().removeprefix(_ALL_FRAMES)
        feed = self._feeds.get(topic)
        if feed is None:
            return
        if message["type"] == "subscribe":
            feed.subscribed.set()
        elif message["type"] == "message":
            text = message["data"].decode()
            if found := _SEQ.match(text):
                feed.hear(found[1], int(found[2]), text)

    async def _look(self) -> None:
        """Heads in the database against what the sockets were offered."""
        while True:
            await asyncio.sleep(_LOOK_S if self._connected else _LOOK_ALONE_S)
            feeds = [feed for feed in self._feeds.values() if feed.ready.is_set()]
            try:
                found = await heads([feed.topic for feed in feeds])
            except Exception as error:
                log.warning("the heads of live topics were not read, trying again: %s", error)
                continue
            for feed in feeds:
                epoch, seq = found.get(feed.topic, ("", 0))
                if epoch and (epoch != feed.epoch or seq > feed.head):
                    feed.announced = max(feed.announced, seq)
                    feed.catch_up()

    async def _beat(self) -> None:
        """A frame with each topic's head, so that a page knows that it has everything and that somebody is there."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for feed in self._feeds.values():
                if feed.epoch:
                    text = heartbeat(feed)
                    for client in feed.clients:
                        # the number below 0 tells `pump` that this is no frame of the topic
                        client.offer(-feed.head - 1, text)


def heartbeat(feed: Feed) -> str:
    return live.frame_text(feed.epoch, feed.head, "heartbeat", "{}")


def _names(channels: Iterable[bytes | str]) -> Iterator[str]:
    return (name.decode() if isinstance(name, bytes) else name for name in channels)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """The hub of the running event loop."""
    return _hubs.setdefault(asyncio.get_running_loop(), Hub())
