"""Django behind ASGI with a fixed number of threads, each with one lasting database connection.

Django's own handler starts a thread and opens a connection for each request, so 200 requests per
second exhaust PostgreSQL's connections. Requests beyond the number of threads wait in order of
arrival. A request that would wait too long is refused at once, because a late answer is useless
to a client that has given up, except those that are never refused. Does not depend on views.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, cast
from weakref import WeakKeyDictionary

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.core import signals
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.db import connections
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

from orchestrator.config import overload

_URGENT_THREADS = 2
_METRICS_THREADS = 1  # a slow scrape delays no urgent request


class Busy(Exception):
    """No thread became free in time."""


class RequestThreads:
    """The threads of one event loop. `call` runs up to `count` functions at once.

    Up to `queue` calls wait for a thread, each for at most `wait_s`; 0: no limit. Neither holds for
    calls that are not `refusable`.
    """

    def __init__(self, count: int, *, queue: int = 0, wait_s: float = 0.0) -> None:
        self._count = count
        self._queue = queue
        self._wait_s = wait_s or None
        self._waiting = 0
        self._slots = asyncio.Semaphore(count)
        self._idle: list[ThreadPoolExecutor] = []  # the last used first: its caches are warm

    @property
    def full(self) -> bool:
        """Whether no further call may wait."""
        return 0 < self._queue <= self._waiting

    async def call(
        self, function: Callable[[], HttpResponseBase], *, refusable: bool = True
    ) -> tuple[HttpResponseBase, ThreadPoolExecutor | None]:
        """The function's response, and the thread if the response still produces content.

        The caller then gives the thread back with `done`. If the caller is cancelled, the thread
        is used again once the function returns. Raises Busy if no thread becomes free in time.
        """
        await self._acquire(self._wait_s if refusable else None)
        thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1, "request")
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(thread, copy_context().run, function)
        abandoned = False

        def finished(future: asyncio.Future[HttpResponseBase]) -> None:
            response = None if future.exception() else future.result()
            if response is None or not response.streaming:
                self.done(thread)
            elif abandoned:
                thread.submit(response.close)
                self.done(thread)
            self._slots.release()

        future.add_done_callback(finished)
        try:
            response = await asyncio.shield(future)
        except asyncio.CancelledError:
            abandoned = True
            raise
        return response, thread if response.streaming else None

    async def _acquire(self, wait_s: float | None) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Busy from None
        finally:
            self._waiting -= 1

    def done(self, thread: ThreadPoolExecutor) -> None:
        """Keep the thread for later requests, or end it if there are enough."""
        if len(self._idle) < self._count:
            self._idle.append(thread)
        else:
            thread.submit(connections.close_all)
            thread.shutdown(wait=False)


class _Loop:
    """What the handler keeps for each event loop."""

    def __init__(self) -> None:
        wait_s = settings.WEB_WAIT_S
        self.normal = RequestThreads(settings.WEB_THREADS, queue=settings.WEB_QUEUE, wait_s=wait_s)
        self.urgent = RequestThreads(_URGENT_THREADS)
        self.metrics = RequestThreads(_METRICS_THREADS)
        self.refused = overload.RefusedRequests()


class RequestHandler(ASGIHandler):
    """Handles a request with all middleware in one call on one thread."""

    def __init__(self) -> None:
        super(ASGIHandler, self).__init__()
        self.load_middleware(is_async=False)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the request, handle it, send the response."""
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            state = self._loops[loop] = _Loop()
        threads, refusable = state.normal, overload.may_refuse(scope)
        if overload.is_urgent(scope):
            threads, refusable = state.urgent, False
        elif overload.is_metrics(scope):
            threads, refusable = state.metrics, False
        if threads.full and refusable:  # before the body: it may be large
            await self._refuse(state, scope, send)
            return
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        try:
            response, thread = await threads.call(
                lambda: self._respond(scope, body), refusable=refusable
            )
        except Busy:
            body.close()
            await self._refuse(state, scope, send)
            return
        if thread is None:
            await self.send_response(response, send)
            return
        try:
            async with ThreadSensitiveContext(executor=thread):
                await self._stream(response, receive, send)
        finally:
            threads.done(thread)

    async def _refuse(self, state: _Loop, scope: Any, send: Any) -> None:
        state.refused.add()
        await self.send_response(overload.response(scope), send)

    def _respond(self, scope: Any, body: Any) -> HttpResponseBase:
        """The response; closed, unless it still produces content."""
        set_script_prefix(get_script_prefix(scope))
        # the receivers check this thread's database connection
        signals.request_started.send(sender=self.__class__, scope=scope)
        _trust_open_connection()
        request, refused = self.create_request(scope, body)
        response: Any = refused if request is None else self.get_response(request)
        response._handler_class = self.__class__
        if not response.streaming:
            response.close()  # and the request with its body
        return cast(HttpResponseBase, response)

    async def _stream(self, response: HttpResponseBase, receive: Any, send: Any) -> None:
        """Send content as it is produced, until the client disconnects."""
        gone = asyncio.create_task(self.listen_for_disconnect(receive))
        sending = asyncio.create_task(self.send_response(response, send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            for task in (gone, sending):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestAborted):
                    await task
            await sync_to_async(response.close)()


def _trust_open_connection() -> None:
    """Save Django's `SELECT 1` per request while PostgreSQL has not closed the connection.

    The socket of a connection that the server has ended is readable. Django then checks and
    connects again.
    """
    connection: Any
    for connection in connections.all(initialized_only=True):
        database = connection.connection
        if connection.vendor == "postgresql" and database is not None and not database.closed:
            poll = select.poll()
            poll.register(database.fileno(), select.POLLIN)
            connection.health_check_done = not poll.poll(0)
