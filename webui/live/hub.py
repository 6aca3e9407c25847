"""Fans out live frames in one web process: one Redis subscription per topic, frames as raw text.

Every socket gets each frame once and in order. A gap in the numbers, or a database poll of the
topics' heads every second, makes the hub read missing frames from the database, so delivery does
not depend on Redis.
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
from workers.contracts.wire.broker.tls import tls_options

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 5.0
# interval of database polls; the only source while Redis is unavailable
_POLL_S: Final = 1.0
_POLL_WITHOUT_REDIS_S: Final = 0.25
_ALL_FRAMES: Final = "orrery:live:"  # a dummy topic, so the subscription is never empty
_UNNUMBERED: Final = '{"type":'  # a frame of `live.announce`
_SEQ: Final = re.compile(r'\{"epoch":"([^"]*)","seq":(\d+),')


class Hub:
    """All topics that sockets of this process and event loop listen to."""

    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pubsub: Any = None
        self._connected = False

    async def join(self, topic: str, client: Client) -> Feed:
        """Add a socket; it is offered every frame above the feed's `head` from now on.

        Raises the error of reading the head, for all sockets that wait for it.
        """
        while (feed := self._feeds.get(topic)) is not None:
            feed.clients.add(client)
            try:
                await feed.ready.wait()
            except BaseException:
                await self.leave(topic, client)
                raise
            if feed.error is not None:
                raise feed.error.with_traceback(None)
            if self._feeds.get(topic) is feed:
                return feed
            # the socket that read the head was cancelled
        feed = self._feeds[topic] = Feed(topic)
        feed.clients.add(client)
        try:
            await self._open(feed)
        except BaseException as error:
            feed.error = error if isinstance(error, Exception) else None
            feed.ready.set()
            await self._close(feed)
            raise
        return feed

    async def _open(self, feed: Feed) -> None:
        """Subscribe the feed's channel and read its head."""
        if not self._tasks:
            self._connected = False
            self._tasks = [
                asyncio.create_task(work())
                for work in (self._listen, self._poll, self._send_heartbeats)
            ]
        if self._connected:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._pubsub.subscribe(feed.channel)
                # if it fails, polling delivers the frames
                async with asyncio.timeout(1.0):
                    await feed.subscribed.wait()
        now = await head_of(feed.topic)
        feed.epoch, feed.head = now.epoch, now.seq
        feed.ready.set()
        if feed.announced > feed.head:
            feed.catch_up()

    async def leave(self, topic: str, client: Client) -> None:
        """Remove a socket; the last one unsubscribes the topic."""
        feed = self._feeds.get(topic)
        if feed is None:
            return
        feed.clients.discard(client)
        if not feed.clients:
            await self._close(feed)

    async def _close(self, feed: Feed) -> None:
        """Forget the feed and unsubscribe its channel."""
        del self._feeds[feed.topic]
        if feed.sync is not None:
            feed.sync.cancel()
        if self._feeds and self._connected:
            with contextlib.suppress(redis.RedisError, OSError):
                await self._pubsub.unsubscribe(feed.channel)
        self._rest()

    def _rest(self) -> None:
        """End the tasks while no socket listens."""
        if not self._feeds:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()

    async def _listen(self) -> None:
        """Forward frames from Redis to feeds; after a reconnect, read missed frames."""
        own = asyncio.current_task()
        while own in self._tasks:
            connection = redis.asyncio.Redis.from_url(
                settings.REDIS_URL,
                socket_connect_timeout=2.0,
                **tls_options(settings.REDIS_URL),
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
                    await self._pubsub.subscribe(*left_out)  # topics joined meanwhile
                for feed in self._feeds.values():
                    feed.catch_up()
                # redis-py swallows a cancellation that comes while it connects
                while own in self._tasks:
                    message = await self._pubsub.get_message(timeout=_POLL_S)
                    if message is not None:
                        self._receive(message)
            except (redis.RedisError, OSError, RuntimeError) as error:
                if self._connected:
                    log.warning("Redis unavailable, live frames come from the database: %s", error)
                self._connected = False
            finally:
                if own in self._tasks:
                    self._connected = False
                with contextlib.suppress(Exception):
                    await connection.aclose()
            await asyncio.sleep(0.5)

    def _receive(self, message: dict[str, Any]) -> None:
        topic = message["channel"].decode().removeprefix(_ALL_FRAMES)
        feed = self._feeds.get(topic)
        if feed is None:
            return
        if message["type"] == "subscribe":
            feed.subscribed.set()
        elif message["type"] == "message":
            text = message["data"].decode()
            if match := _SEQ.match(text):
                feed.receive(match[1], int(match[2]), text)
            elif text.startswith(_UNNUMBERED):
                feed.pass_on(text)

    async def _poll(self) -> None:
        """Compare heads in the database with what the sockets were offered."""
        while True:
            await asyncio.sleep(_POLL_S if self._connected else _POLL_WITHOUT_REDIS_S)
            feeds = [feed for feed in self._feeds.values() if feed.ready.is_set()]
            try:
                current = await heads([feed.topic for feed in feeds])
            except Exception as error:
                log.warning("could not read heads of live topics, retrying: %s", error)
                continue
            for feed in feeds:
                epoch, seq = current.get(feed.topic, ("", 0))
                if epoch and (epoch != feed.epoch or seq > feed.head):
                    feed.announced = max(feed.announced, seq)
                    feed.catch_up()

    async def _send_heartbeats(self) -> None:
        """Send each topic's head, so pages detect missing frames and dead connections.

        A topic without frames has no epoch yet and the head 0.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for feed in self._feeds.values():
                if feed.ready.is_set():
                    text = heartbeat(feed)
                    for client in feed.clients:
                        # a negative number marks a frame outside the sequence
                        client.offer(-feed.head - 1, text)


def _names(channels: Iterable[bytes | str]) -> Iterator[str]:
    return (name.decode() if isinstance(name, bytes) else name for name in channels)


_hubs: WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = WeakKeyDictionary()


def hub() -> Hub:
    """Return the hub of the running event loop."""
    return _hubs.setdefault(asyncio.get_running_loop(), Hub())
