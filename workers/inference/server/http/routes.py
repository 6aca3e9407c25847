"""The routes: keys checked, bodies read, answers sent whole or by server-sent events, every error
in OpenAI's shape.

Knows HTTP; what an answer is, `desk` and `order` know. A client that goes away takes its request
along.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from workers.contracts.wire.serving_reports import (
    REPLICA_STATS_PATH,
    STATE_PATH,
    EngineState,
    ReplicaStats,
)
from workers.inference.server.http.disconnect import GONE, unless_gone
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.request_handler import Desk, Wish
from workers.inference.server.http.schemas import event
from workers.inference.server.observe.engine_state import merged
from workers.inference.server.token_stream import Order

MOST_BYTES = 32 << 20  # of a body


def make_app(desk: Desk) -> Starlette:
    """The ASGI application."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": desk.models()})

    async def model(request: Request) -> Response:
        desk.check_model(request.path_params["name"])
        return JSONResponse(desk.models()[0])

    async def completions(request: Request) -> Response:
        return await _answer(request, desk, chat=False)

    async def chat(request: Request) -> Response:
        return await _answer(request, desk, chat=True)

    async def health(request: Request) -> Response:
        broken, draining = desk.pump.broke.done(), desk.gate.draining
        status = "broken" if broken else "draining" if draining else "ok"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    async def state(request: Request) -> Response:
        desk.gate.check_key(request.headers, house_only=True)
        try:
            told = await state_of(desk)
        except TimeoutError:
            raise ApiError(
                "the present step takes long; ask again", status=503, retry_after_s=2.0
            ) from None
        return JSONResponse(told.to_dict())

    async def tally(request: Request) -> Response:
        desk.gate.check_key(request.headers, house_only=True)
        if desk.others is None:
            raise HTTPException(404)
        body = await read_body(request)
        try:
            desk.others.hear(ReplicaStats.model_validate_json(body))
        except ValueError as error:
            raise ApiError(f"this is no replica's tally: {error}") from None
        return Response(status_code=204)

    def keyed(
        handler: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            desk.gate.check_key(request.headers)
            return await handler(request)

        return checked

    return Starlette(
        routes=[
            Route("/v1/models", keyed(models)),
            Route("/v1/models/{name:path}", keyed(model)),
            Route("/v1/completions", keyed(completions), methods=["POST"]),
            Route("/v1/chat/completions", keyed(chat), methods=["POST"]),
            Route("/health", health),
            Route(STATE_PATH, state),
            Route(REPLICA_STATS_PATH, tally, methods=["POST"]),
        ],
        exception_handlers=error_handlers(),
    )


async def _answer(request: Request, desk: Desk, *, chat: bool) -> Response:
    body = await read_body(request)
    try:
        wish = await desk.read(_json(body), chat=chat)
    except RecursionError:
        raise ApiError("the request nests too deep; send a flatter one") from None
    if desk.fleet is None:
        return await _here(request, desk, wish)
    if desk.gate.draining:
        raise desk.gate.refusal()
    replica = desk.fleet.choose(wish.prompts[0], wish.answers)

    def ended() -> None:
        replica.inside -= wish.answers

    if replica.relay is not None:
        return await replica.relay.pass_on(
            request, body, client=_client(request, desk), ended=ended
        )
    return await _here(request, desk, wish, ended)


async def _here(
    request: Request, desk: Desk, wish: Wish, ended: Callable[[], None] = lambda: None
) -> Response:
    try:
        order = await desk.order(wish, _client(request, desk))
    except BaseException:
        ended()
        raise
    order.held.callback(ended)
    if order.asked.stream:
        return _Events(order)
    try:
        return JSONResponse(await unless_gone(request, order.whole()))
    except (ApiError, ClientDisconnect):
        raise
    except Exception as error:
        raise _of_engine(error) from error
    finally:
        order.close()


def _client(request: Request, desk: Desk) -> str:
    return desk.gate.client(
        request.headers, request.client.host if request.client is not None else ""
    )


class _Events(StreamingResponse):
    """`data: {...}` a chunk, `data: [DONE]` at the end; whatever happens, the order is closed."""

    def __init__(self, order: Order) -> None:
        super().__init__(
            _events(order), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        self.order = order

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.order.close()


async def _events(order: Order) -> AsyncIterator[bytes]:
    try:
        async for chunk in order.chunks():
            yield event(chunk)
    except Exception as error:
        told = error if isinstance(error, ApiError) else _of_engine(error)
        yield event(told.body)
        return
    yield b"data: [DONE]\n\n"


async def state_of(desk: Desk) -> EngineState:
    """Of all replicas that answer. Raises TimeoutError where the present step takes long."""
    own = await desk.pump.state(draining=desk.gate.draining)
    if desk.fleet is None:
        return own
    relays = [each.relay for each in desk.fleet.replicas if each.relay is not None]
    others = await asyncio.gather(
        *(each.json(STATE_PATH) for each in relays), return_exceptions=True
    )
    return merged(
        [own, *(EngineState.model_validate(each) for each in others if isinstance(each, dict))]
    )


async def read_body(request: Request) -> bytes:
    """Raises ApiError for one that is too large."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_BYTES:
            raise ApiError(f"the body is larger than {MOST_BYTES:,} bytes; send less", status=413)
        pieces.append(piece)
    return b"".join(pieces)


def _json(body: bytes) -> Any:
    try:
        found = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant)
        if b"\\u" in body:
            # half a character is none: nobody could be told of it
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise ApiError(
            f"We could not parse the JSON body of your request: {str(error)[:200]}"
        ) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _of_engine(error: Exception) -> ApiError:
    message = (
        f"the engine could not go on: {type(error).__name__}: {str(error)[:300]}; the run's "
        "log tells more"
    )
    return ApiError(message, status=500, code="engine_error")


def error_handlers() -> dict[Any, Any]:
    """For Starlette: whatever goes wrong is told in OpenAI's shape."""
    return {
        ApiError: _refused,
        HTTPException: _no_route,
        ClientDisconnect: _left,
        Exception: _broken,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path}: {error.detail}; this server has /v1/models, "
        "/v1/completions and "
    )
    told = ApiError(f"{message}/v1/chat/completions", status=error.status_code, code="unknown_url")
    return JSONResponse(told.body, status_code=told.status)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse(_of_engine(error).body, status_code=500)
