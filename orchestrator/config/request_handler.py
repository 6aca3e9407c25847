"""Django behind ASGI with a fixed number of threads, each with one lasting database connection.

Django's own handler starts a thread and opens a connection for each request, so 200 requests per
second exhaust PostgreSQL's connections. Requests beyond the number of threads wait in order of
arrival. Does not depend on URLs or views.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class RequestThreads:
    """The threads of one event loop. `call` runs up to `count` functions at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._slots = asyncio.Semaphore(count)
        self._idle: list[ThreadPoolExecutor] = []  # the last used first: its caches are warm

    async def call(
        self, function: Callable[[], HttpResponseBase]
    ) -> tuple[HttpResponseBase, ThreadPoolExecutor | None]:
        """The function's response, and the thread if the response still produces content.

        The caller then gives the thread back with `done`. If the caller is cancelled, the thread
        is used again once the function returns.
        """
        await self._slots.acquire()
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

    def done(self, thread: ThreadPoolExecutor) -> None:
        """Keep the thread for later requests, or end it if there are enough."""
        if len(self._idle) < self._count:
            self._idle.append(thread)
        else:
            thread.submit(connections.close_all)
            thread.shutdown(wait=False)


class RequestHandler(ASGIHandler):
    """Handles a request with all middleware in one call on one thread."""

    def __init__(self) -> None:
        super(ASGIHandler, self).__init__()
        self.load_middleware(is_async=False)
        self._threads: WeakKeyDictionary[asyncio.AbstractEventLoop, RequestThreads]
        self._threads = WeakKeyDictionary()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Read the request, handle it, send the response."""
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        loop = asyncio.get_running_loop()
        threads = self._threads.get(loop)
        if threads is None:
            threads = self._threads[loop] = RequestThreads(settings.WEB_THREADS)
        response, thread = await threads.call(lambda: self._respond(scope, body))
        if thread is None:
            await self.send_response(response, send)
            return
        try:
            async with ThreadSensitiveContext(executor=thread):
                await self._stream(response, receive, send)
        finally:
            threads.done(thread)

    def _respond(self, scope: Any, body: Any) -> HttpResponseBase:
        """The response; closed, unless it still produces content."""
        set_script_prefix(get_script_prefix(scope))
        # the receivers check this thread's database connection
        signals.request_started.send(sender=self.__class__, scope=scope)
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
