"""Live sockets: authenticate, authorize, replay missed frames, then forward new frames from `hub`.

Sends only; messages from the page are ignored. Re-checks authorization periodically: a token may be
revoked, a session ended, a user may leave a team.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from importlib import import_module
from typing import Any, Final
from urllib.parse import parse_qs

from channels.auth import get_user
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth.base_user import AbstractBaseUser
from django.db import DatabaseError, InterfaceError

from orchestrator.accounts.selectors import token_scopes, token_user, visible_owners
from orchestrator.common import clock, live
from orchestrator.common.errors import Refusal
from orchestrator.runs.live_frames import progress_text
from orchestrator.runs.selectors import run_get, runs_seen_since
from webui.live.hub import hub
from webui.live.topic_feeds import Client, Feed, frames_after, head_of, hidden_frame

NOT_LOGGED_IN: Final = 4401
FORBIDDEN: Final = 4403
NOT_FOUND: Final = 4404
BAD_REQUEST: Final = 4400
RECHECK_S: Final = 30.0
# a page connects within seconds of its rendering; the limit bounds the cost on a large fleet, where
# the next value of a run follows soon
RECENT_S: Final = 60.0
RECENT_RUNS: Final = 200
_DIGITS: Final = 20  # of a frame number


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]
    """Frames of one topic.

    `?after=SEQ&epoch=E` first replays what followed SEQ, if that is 2,000 frames or fewer.
    """

    topic: str = ""
    _scopes: frozenset[str] | None = None  # of the bearer token; None: a session

    async def connect(self) -> None:
        """Authenticate, authorize, join the topic and replay missed frames."""
        await self.accept()
        self._client = Client(self.base_send)
        self._tasks: list[asyncio.Task[None]] = []
        user = await self._user()
        if user is None:
            await self.close(
                NOT_LOGGED_IN, "Log in first, or send a bearer token in the Authorization header."
            )
            return
        if not self._may_read():
            await self.close(FORBIDDEN, "The token lacks the scope read.")
            return
        topic = await self.topic_for(user)
        if topic is None:
            await self.close(NOT_FOUND, "No such run, or you may not see it.")
            return
        try:
            after, epoch = _position(self.scope["query_string"])
        except ValueError as error:
            await self.close(BAD_REQUEST, str(error))
            return
        self.topic = topic
        feed = await hub().join(topic, self._client)
        try:
            await self._replay(feed, after, epoch)
        except BaseException:  # `disconnect` is not called after a failed `connect`
            await hub().leave(topic, self._client)
            raise
        self._tasks = [
            asyncio.create_task(self._client.pump(feed)),
            asyncio.create_task(self._watch()),
        ]

    async def disconnect(self, code: int) -> None:
        """Stop the tasks and leave the topic."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        if self.topic:
            await hub().leave(self.topic, self._client)

    async def topic_for(self, user: AbstractBaseUser) -> str | None:
        """Return the topic of the path; None if the user may not see it."""
        raise NotImplementedError

    async def current_readings(self) -> list[str]:
        """Return frames without a number that a page may have missed before it joined."""
        return []

    async def _watch(self) -> None:
        """Close the socket when its user loses access."""
        while True:
            await asyncio.sleep(RECHECK_S)
            # database unavailable: checked next time
            with contextlib.suppress(DatabaseError, InterfaceError):
                user = await self._user(recheck=True)
                if user is None:
                    await self.close(NOT_LOGGED_IN, "Session or token ended. Log in again.")
                    return
                if not self._may_read():
                    await self.close(FORBIDDEN, "The token no longer has the scope read.")
                    return
                if await self.topic_for(user) is None:
                    await self.close(NOT_FOUND, "You may no longer see this run.")
                    return

    async def _user(self, *, recheck: bool = False) -> AbstractBaseUser | None:
        """Return the user of the session (re-read for `recheck`), else of the bearer token."""
        user = self.scope.get("user")
        if recheck and user is not None and user.is_authenticated:
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
        result = await database_sync_to_async(token_user, thread_sensitive=False)(text.strip())
        if result is None:
            return None
        self._scopes = token_scopes(*result)
        owner: AbstractBaseUser = result[0]
        return owner

    def _may_read(self) -> bool:
        """Whether the credentials have the scope `read`; a session has all scopes of its role."""
        return self._scopes is None or "read" in self._scopes

    async def _replay(self, feed: Feed, after: int | None, epoch: str) -> None:
        """Send frames between the client's position and the feed's head."""
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
                seen = client.may_see(live.owner_of(text))
                await client.send(text if seen else hidden_frame(now.epoch, seq))
                client.sent = seq
        await client.send(live.frame_text(now.epoch, client.sent, "heartbeat", "{}"))
        for text in await self.current_readings():
            await client.send(text)


class RunConsumer(LiveConsumer):
    """Frames of one run."""

    async def topic_for(self, user: AbstractBaseUser) -> str | None:
        """Return the run's topic; None if the user may not see it."""
        topic: str | None = await run_topic(user, self.scope["url_route"]["kwargs"]["id"])
        return topic


class FleetConsumer(LiveConsumer):
    """Frames of the fleet; of runs only those that the user may see."""

    async def topic_for(self, user: AbstractBaseUser) -> str | None:
        """Return `fleet`; sets whose runs the socket gets."""
        owners = await owners_visible_to(user)
        self._client.owners = None if owners is None else frozenset(owners)
        return "fleet"

    async def current_readings(self) -> list[str]:
        """Return the progress of runs that sent values between a page's rendering and now."""
        texts: list[str] = await recent_progress(self._client.owners)
        return texts


def _run_topic(user: Any, id: str) -> str | None:
    try:
        return f"run:{run_get(user=user, id=id).pk}"
    except Refusal:
        return None


run_topic = database_sync_to_async(_run_topic, thread_sensitive=False)


def _recent_progress(owners: frozenset[int] | None) -> list[str]:
    rows = runs_seen_since(
        clock.now() - timedelta(seconds=RECENT_S), owners=owners, limit=RECENT_RUNS
    )
    return [progress_text(*row) for row in rows]


recent_progress = database_sync_to_async(_recent_progress, thread_sensitive=False)
owners_visible_to = database_sync_to_async(visible_owners, thread_sensitive=False)


def _position(query: bytes) -> tuple[int | None, str]:
    """`after` and `epoch` of the query string."""
    params: dict[str, Any] = parse_qs(query.decode("latin-1"))
    epoch = params.get("epoch", [""])[0]
    if "after" not in params:
        return None, epoch
    text = params["after"][0]
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise ValueError("after is not a frame number.")
    return int(text), epoch
