"""Work for a client that may go away before it is done.

Knows connections; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")
GONE = 499  # nginx's status for a client that closed its request; nobody reads it


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, or raises. Once the client has closed its connection the work is cancelled
    and
    ClientDisconnect raised. The request's body has to be read before."""
    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        raise ClientDisconnect
    finally:
        for each in (done, gone):
            each.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
