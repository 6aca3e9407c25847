"""A minimal model server of a serve run, for tests of the proxy and pages.

Implements the part of OpenAI's API that the tests need, and reports an EngineState.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from orchestrator.runs import services as runs
from orchestrator.runs.models import Attempt, Run
from workers.contracts.wire.serving_reports import (
    KEY_HEADER,
    EngineState,
    RequestStats,
    Serving,
    serve_key,
)


class Thread:
    """An ASGI application on a free port of this process."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="on", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Thread:
        self._thread.start()
        deadline = time.monotonic() + 90
        while not self._server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(90)
        assert not self._thread.is_alive(), "a client keeps its connection open"


class ModelServer:
    """`go_on` lets the next word of a stream out; `freed` counts the requests whose client went
    away, `waits` those
    that wait for that."""

    def __init__(self, fence: object) -> None:
        self.key = serve_key(str(fence))
        self.go_on, self.waits, self.freed = (threading.Semaphore(0) for _ in range(3))
        self.calls: list[dict[str, Any]] = []
        self.state = EngineState(
            now_s=0, running=0, waiting=0, blocks=8, block_size=16, used=0, map="." * 8
        )
        routes = [
            Route("/v1/models", self._models),
            Route("/internal/state", self._reported),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/break", self._breaks, methods=["POST"]),
            Route("/v1/load_lora_adapter", self._adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._adapter, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        if request.headers.get(KEY_HEADER) != self.key:
            return JSONResponse({"error": {"message": "no key"}}, 401)
        assert "authorization" not in request.headers and "cookie" not in request.headers
        return JSONResponse(
            {
                "object": "list",
                "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": ""}],
            }
        )

    async def _reported(self, request: Request) -> Response:
        return JSONResponse(
            self.state.to_dict(), 200 if request.headers.get(KEY_HEADER) == self.key else 401
        )

    async def _chat(self, request: Request) -> Response:
        given = await request.json()
        self.calls.append(given)
        if given.get("user") == "in no hurry":
            self.waits.release()
            while not await request.is_disconnected():
                await asyncio.sleep(0.005)
            self.freed.release()
        if not given.get("stream"):
            return JSONResponse(
                _answer("chat.completion", message={"role": "assistant", "content": "one two"})
            )
        return StreamingResponse(self._words(request), media_type="text/event-stream")

    async def _adapter(self, request: Request) -> Response:
        self.calls.append(await request.json())
        return Response("Success", 200 if request.headers.get(KEY_HEADER) == self.key else 401)

    async def _words(self, request: Request) -> AsyncIterator[bytes]:
        try:
            for word in ("one ", "two ", "three"):
                while not self.go_on.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                yield _event(_answer("chat.completion.chunk", delta={"content": word}))
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.freed.release()
            raise

    async def _breaks(self, request: Request) -> Response:
        async def part() -> AsyncIterator[bytes]:
            yield _event({"n": 1})
            raise ConnectionError("the engine is gone")

        return StreamingResponse(part(), media_type="text/event-stream")


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    choices = [{"index": 0, "finish_reason": None, **choice}]
    return {"id": "c-1", "object": kind, "created": 1, "model": "tiny", "choices": choices}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def serves(run: Run, attempt: Attempt, port: int, **more: Any) -> None:
    """Record the event that reports a serving run."""
    result = Serving(
        host="127.0.0.1",
        port=port,
        model="tiny",
        context=512,
        **{"chat": True, "blocks": 8, **more},
    )
    runs.event_record(
        run=run, type="serving", data=result.to_dict(), attempt=attempt.number, rank=0
    )


def result(id: str, state: str = "decode", **more: Any) -> RequestStats:
    values = {
        "added_s": 1.0,
        "prompt_tokens": 12,
        "max_new_tokens": 40,
        "new_tokens": 5,
        "blocks": 2,
    }
    return RequestStats.from_dict({"id": id, "state": state, **values, **more})
