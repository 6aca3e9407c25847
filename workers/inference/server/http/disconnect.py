"""Cancels work when the client of its request disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client reads it


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientDisconnect, and cancels it, if the client disconnects.

    The request's body has to be read before.
    """
    done = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((done, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        raise ClientDisconnect
    finally:
        for task in (done, disconnected):
            task.cancel()
        await asyncio.gather(done, disconnected, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
