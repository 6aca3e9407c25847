"""The routes: check keys, read bodies, send responses complete or as server-sent events.

A client that disconnects cancels its request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from workers.contracts.wire.serving_reports import REPLICA_STATS_PATH, STATE_PATH, ReplicaStats
from workers.inference.server.http.adapter_routes import adapter_routes
from workers.inference.server.http.body import parse_json, read_body
from workers.inference.server.http.disconnect import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from workers.inference.server.http.errors import ApiError, engine_error
from workers.inference.server.http.request_handler import RequestHandler
from workers.inference.server.http.request_parsing import ParsedRequest
from workers.inference.server.http.schemas import server_sent_event
from workers.inference.server.token_stream import TokenStream

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(handler: RequestHandler) -> Starlette:
    """The ASGI application."""

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": handler.models()})

    async def model(request: Request) -> Response:
        return JSONResponse(handler.model(request.path_params["name"]))

    async def completions(request: Request) -> Response:
        return await _answer(request, handler, partial(handler.parse, chat=False))

    async def chat(request: Request) -> Response:
        return await _answer(request, handler, partial(handler.parse, chat=True))

    async def pooling(request: Request) -> Response:
        return await _answer(request, handler, partial(handler.parse_scores, kind="pooling"))

    async def score(request: Request) -> Response:
        return await _answer(request, handler, partial(handler.parse_scores, kind="score"))

    async def health(request: Request) -> Response:
        broken, draining = handler.engine.stopped.done(), handler.admission.draining
        status = "broken" if broken else "draining" if draining else "ok"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    async def state(request: Request) -> Response:
        handler.admission.check_key(request.headers, control_plane_only=True)
        try:
            return JSONResponse((await handler.state()).to_dict())
        except TimeoutError:
            raise ApiError(
                "the engine is still running a step; try again", status=503, retry_after_s=2.0
            ) from None

    async def replica_stats(request: Request) -> Response:
        handler.admission.check_key(request.headers, control_plane_only=True)
        if handler.replica_stats is None:
            raise HTTPException(404)
        body = await read_body(request)
        try:
            handler.replica_stats.receive(ReplicaStats.model_validate_json(body))
        except ValueError as error:
            raise ApiError(f"the body is not valid replica statistics: {error}") from None
        return Response(status_code=204)

    def with_key(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            handler.admission.check_key(request.headers)
            return await endpoint(request)

        return checked

    return Starlette(
        routes=[
            Route("/v1/models", with_key(models)),
            Route("/v1/models/{name:path}", with_key(model)),
            Route("/v1/completions", with_key(completions), methods=["POST"]),
            Route("/v1/chat/completions", with_key(chat), methods=["POST"]),
            # vLLM serves them without /v1, the control plane forwards only paths below it
            *(
                Route(prefix + path, with_key(endpoint), methods=["POST"])
                for prefix in ("", "/v1")
                for path, endpoint in (("/pooling", pooling), ("/score", score))
            ),
            *adapter_routes(handler),
            Route("/health", health),
            Route(STATE_PATH, state),
            Route(REPLICA_STATS_PATH, replica_stats, methods=["POST"]),
        ],
        exception_handlers=error_handlers(),
    )


async def _answer(
    request: Request, handler: RequestHandler, parse: Callable[[Any], Awaitable[ParsedRequest]]
) -> Response:
    body = await read_body(request)
    try:
        parsed = await parse(parse_json(body))
    except RecursionError:
        raise ApiError("the request is nested too deeply; send a flatter one") from None
    if handler.router is None:
        return await _answer_here(request, handler, parsed)
    if handler.admission.draining:
        raise handler.admission.draining_error()
    adapter = None if parsed.adapter is None else parsed.adapter.name
    replica = handler.router.route(parsed.prompts[0], parsed.answers, adapter=adapter)

    def on_end() -> None:
        replica.in_progress -= parsed.answers

    if replica.upstream is not None:
        client = _client(request, handler)
        return await replica.upstream.forward(request, body, client=client, on_end=on_end)
    return await _answer_here(request, handler, parsed, on_end)


async def _answer_here(
    request: Request,
    handler: RequestHandler,
    parsed: ParsedRequest,
    on_end: Callable[[], None] = lambda: None,
) -> Response:
    try:
        stream = await handler.submit(parsed, _client(request, handler))
    except BaseException:
        on_end()
        raise
    stream.resources.callback(on_end)
    if parsed.stream:
        return _EventStream(stream)
    try:
        return JSONResponse(await cancel_on_disconnect(request, stream.response()))
    except (ApiError, ClientDisconnect):
        raise
    except Exception as error:
        raise engine_error(error) from error
    finally:
        stream.close()


def _client(request: Request, handler: RequestHandler) -> str:
    address = request.client.host if request.client is not None else ""
    return handler.admission.client(request.headers, address)


class _EventStream(StreamingResponse):
    """`data: {...}` per chunk, `data: [DONE]` at the end; always closes the token stream."""

    def __init__(self, stream: TokenStream) -> None:
        super().__init__(
            _events(stream), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.stream.close()


async def _events(stream: TokenStream) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream.response_chunks():
            yield server_sent_event(chunk)
    except Exception as error:
        api_error = error if isinstance(error, ApiError) else engine_error(error)
        yield server_sent_event(api_error.body)
        return
    yield b"data: [DONE]\n\n"


def error_handlers() -> dict[Any, Any]:
    """Exception handlers for Starlette: every error in OpenAI's shape."""
    return {
        ApiError: _on_api_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_error,
    }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    api_error = ApiError(
        f"{request.method} {request.url.path}: {error.detail}; this server has /v1/models, "
        "/v1/completions and /v1/chat/completions; of a reward model /pooling and /score",
        status=error.status_code,
        code="unknown_url",
    )
    return JSONResponse(api_error.body, status_code=api_error.status)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_error(request: Request, error: Exception) -> Response:
    return JSONResponse(engine_error(error).body, status_code=500)
