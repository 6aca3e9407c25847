"""Fan-out of live frames inside one web process: one Redis subscription a topic, frames sent on as
the text they are.

Frames reach every socket in order and once: a number that does not follow the last one makes the
hub read what lies
between from the database, and so does a look at the topics' heads every second, so nothing hangs on
Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import redis.asyncio
from django.conf import settings

from webui.live.topic_feeds import Client, Feed, head_of, heads, heartbeat

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 5.0
# between looks at the heads in the database; it is the only way while Redis is away
_LOOK_S: Final = 1.0
_LOOK_ALONE_S: Final = 0.25
_ALL_FRAMES: Final = "orrery:live:"  # an empty topic, so that the subscription is never empty
_SEQ: Final = re.compile(r'\{"epoch":"([^"]*)","seq":(\d+),')


class Hub:
    """All topics that sockets of this process and event loop listen to.

    Works while there are any.
    """

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
            self._tasks = [
                asyncio.create_task(work()) for work in (self._listen, self._look, self._beat)
            ]
        if self._connected:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._pubsub.subscribe(feed.channel)
                # without it the look at the heads comes to the same
                async with asyncio.timeout(1.0):
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
            connection = redis.asyncio.Redis.from_url(
                settings.REDIS_URL, socket_connect_timeout=2.0
            )
            try:
                self._pubsub = connection.pubsub()
                await self._pubsub.subscribe(
                    _ALL_FRAMES, *(feed.channel for feed in self._feeds.values())
                )
                self._connected = True
                if left_out := {feed.channel for feed in self._feeds.values()} - {
                    *_names(self._pubsub.channels)
                }:
                    await self._pubsub.subscribe(*left_out)  # joined meanwhile
                for feed in self._feeds.values():
                    feed.catch_up()
                # redis-py swallows a cancellation that comes while it connects
                while own in self._tasks:
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
        """A frame with each topic's head, so that a page knows that it has everything and that
        somebody is there.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for feed in self._feeds.values():
                if feed.epoch:
                    text = heartbeat(feed)
                    for client in feed.clients:
                        # the number below 0 tells `pump` that this is no frame of the topic
                        client.offer(-feed.head - 1, text)


def _names(channels: Iterable[bytes | str]) -> Iterator[str]:
    return (name.decode() if isinstance(name, bytes) else name for name in channels)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """The hub of the running event loop."""
    return _hubs.setdefault(asyncio.get_running_loop(), Hub())
