"""One live socket: who asks, what may they see, what did they miss, and from there on every frame.

Sends only; what a page says on the socket is ignored. Frames come from `hub`. Who was let in is
asked for again now
and then: a token may be revoked, a login ended, a person leave a team.
"""

from __future__ import annotations

import asyncio
import contextlib
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qs

from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser
from django.db import DatabaseError

from orchestrator.accounts.selectors import token_user
from orchestrator.common import live
from orchestrator.common.errors import Refusal
from orchestrator.runs.selectors import run_get
from webui.live.hub import hub
from webui.live.topic_feeds import Client, Feed, frames_after, head_of

NOT_LOGGED_IN: Final = 4401
NOT_FOUND: Final = 4404
BAD_REQUEST: Final = 4400
ASKED_AGAIN_S: Final = 30.0


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]
    """Frames of one topic.

    `?after=SEQ&epoch=E` first replays what followed SEQ, if that is 2,000 frames or fewer.
    """

    topic: str = ""

    async def connect(self) -> None:
        await self.accept()
        self._client = Client(self.base_send)
        self._tasks: list[asyncio.Task[None]] = []
        user = await self._user()
        if user is None:
            await self.close(
                NOT_LOGGED_IN, "Log in first, or send a bearer token in the Authorization header."
            )
            return
        topic = await self.topic_for(user)
        if topic is None:
            await self.close(NOT_FOUND, "There is no such run, or it is not yours to see.")
            return
        try:
            after, epoch = _place(self.scope["query_string"])
        except ValueError as error:
            await self.close(BAD_REQUEST, str(error))
            return
        self.topic = topic
        feed = await hub().join(topic, self._client)
        await self._replay(feed, after, epoch)
        self._tasks = [
            asyncio.create_task(self._client.pump(feed)),
            asyncio.create_task(self._watch()),
        ]

    async def disconnect(self, code: int) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        if self.topic:
            await hub().leave(self.topic, self._client)

    async def topic_for(self, user: AbstractBaseUser) -> str | None:
        """The topic that the path names, None where this person may not see it."""
        return "fleet"

    async def _watch(self) -> None:
        """Ends the socket of somebody who would not be let in any more."""
        while True:
            await asyncio.sleep(ASKED_AGAIN_S)
            with contextlib.suppress(DatabaseError):  # away for a moment: asked the next time
                user = await self._user(again=True)
                if user is None:
                    await self.close(NOT_LOGGED_IN, "This login or token has ended. Log in again.")
                    return
                if await self.topic_for(user) is None:
                    await self.close(NOT_FOUND, "This run is not yours to see any more.")
                    return

    async def _user(self, *, again: bool = False) -> AbstractBaseUser | None:
        """Of the session as it was read at the handshake, or `again` as it is now; else of the
        bearer token.
        """
        user = self.scope.get("user")
        if again and user is not None and user.is_authenticated:
            now = import_module(settings.SESSION_ENGINE).SessionStore(
                self.scope["session"].session_key
            )
            user = await get_user({**self.scope, "session": now})
        if user is not None and user.is_authenticated and user.is_active:
            return user  # type: ignore[no-any-return]
        headers = {name: value for name, value in self.scope["headers"] if name == b"authorization"}
        scheme, _, text = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        found = await database_sync_to_async(token_user, thread_sensitive=False)(text.strip())
        return found[0] if found else None

    async def _replay(self, feed: Feed, after: int | None, epoch: str) -> None:
        """Brings the socket from what it has to what the feed offers; from `feed.head` on it is
        offered everything.
        """
        client = self._client
        now = await head_of(feed.topic)
        if after is None:
            client.sent = now.seq
        elif after > now.seq or (epoch and epoch != now.epoch):
            await client.skip(feed, now.seq)
        elif (
            now.seq - after > live.REPLAY_LIMIT
            or after + 1 < now.oldest
            or (now.oldest == 0 and after < now.seq)
        ):
            client.sent = after
            await client.skip(feed, now.seq)
        else:
            client.sent = after
            for seq, text in await frames_after(feed.topic, after, live.REPLAY_LIMIT):
                await client.send(text)
                client.sent = seq
        if feed.epoch:
            await client.send(live.frame_text(now.epoch, client.sent, "heartbeat", "{}"))


class RunConsumer(LiveConsumer):
    async def topic_for(self, user: AbstractBaseUser) -> str | None:
        topic: str | None = await run_topic(user, self.scope["url_route"]["kwargs"]["id"])
        return topic


class FleetConsumer(LiveConsumer):
    pass


def _run_topic(user: Any, id: str) -> str | None:
    try:
        return f"run:{run_get(user=user, id=id).pk}"
    except Refusal:
        return None


run_topic = database_sync_to_async(_run_topic, thread_sensitive=False)


def _place(query: bytes) -> tuple[int | None, str]:
    """`after` and `epoch` of the query string."""
    given: dict[str, Any] = parse_qs(query.decode("latin-1"))
    epoch = given.get("epoch", [""])[0]
    if "after" not in given:
        return None, epoch
    text = given["after"][0]
    if not text.isdecimal():
        raise ValueError(f"after={text[:40]} is not the number of a frame")
    return int(text), epoch
