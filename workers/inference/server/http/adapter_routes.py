"""Routes that load and unload adapters while the server runs, with vLLM's names and fields.

`POST /v1/load_lora_adapter {lora_name, lora_path}`, `POST /v1/unload_lora_adapter {lora_name}`.
They read files of the node, so with a control plane only that may call them: it checks who may.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from workers.contracts.specs.inference import AdapterName, AdapterPath
from workers.contracts.wire.serving_reports import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH
from workers.inference.server.http.body import parse_json, read_body
from workers.inference.server.http.errors import ApiError
from workers.inference.server.http.request_handler import RequestHandler
from workers.models.errors import WeightsError

_NAME: TypeAdapter[str] = TypeAdapter(AdapterName)
_PATH: TypeAdapter[str] = TypeAdapter(AdapterPath)


def adapter_routes(handler: RequestHandler) -> list[Route]:
    """The routes that load and unload an adapter."""

    async def load(request: Request) -> Response:
        fields = await _fields(request, handler, {"lora_name", "lora_path"})
        name, path = _text(fields, "lora_name", _NAME), _text(fields, "lora_path", _PATH)
        if name in handler.names:
            raise ApiError(
                f"{name} is the base model's own name; choose another", param="lora_name"
            )
        await _load(handler, name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        fields = await _fields(request, handler, {"lora_name", "lora_int_id"})
        name = _text(fields, "lora_name", _NAME)
        try:
            await handler.engine.unload_adapter(name)
        except KeyError:
            raise ApiError(
                f"The adapter `{name}` is not loaded; GET /v1/models lists those that are",
                status=404,
                param="lora_name",
                code="model_not_found",
            ) from None
        for upstream in handler.upstreams:
            await upstream.call(UNLOAD_ADAPTER_PATH, {"lora_name": name})
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def on_errors(endpoint: Callable[[Request], Awaitable[Response]]) -> Any:
        async def checked(request: Request) -> Response:
            try:
                return await endpoint(request)
            except httpx.HTTPError as error:
                raise ApiError(f"another replica does not answer: {error!r}", status=502) from None

        return checked

    return [
        Route(LOAD_ADAPTER_PATH, on_errors(load), methods=["POST"]),
        Route(UNLOAD_ADAPTER_PATH, on_errors(unload), methods=["POST"]),
    ]


async def _load(handler: RequestHandler, name: str, path: str) -> None:
    """Load here and on every replica, or nowhere. Raises ApiError 400."""
    try:
        await handler.engine.load_adapter(name, path)
    except WeightsError as error:
        raise ApiError(str(error), param="lora_path", code="adapter_refused") from None
    loaded = []
    try:
        for upstream in handler.upstreams:
            body = {"lora_name": name, "lora_path": path}
            status, answer = await upstream.call(LOAD_ADAPTER_PATH, body)
            if status != 200:
                raise ApiError(f"another replica refused the adapter: {answer[:400]}")
            loaded.append(upstream)
    except BaseException:
        await handler.engine.unload_adapter(name)
        for upstream in loaded:
            await upstream.call(UNLOAD_ADAPTER_PATH, {"lora_name": name})
        raise


async def _fields(request: Request, handler: RequestHandler, known: set[str]) -> dict[str, Any]:
    handler.admission.check_key(request.headers, control_plane_only=True)
    if handler.engine.engine.adapters is None:
        raise ApiError(
            "this server has no slots for adapters; start it with serve.adapter_slots",
            code="adapters_disabled",
        )
    fields = parse_json(await read_body(request))
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object")
    if unknown := sorted(fields.keys() - known):
        raise ApiError(
            f"Unrecognized request argument supplied: {unknown[0]}; this server accepts "
            f"{', '.join(sorted(known))}",
            param=unknown[0],
        )
    return fields


def _text(fields: dict[str, Any], name: str, kind: TypeAdapter[str]) -> str:
    try:
        return kind.validate_python(fields.get(name), strict=True)
    except ValidationError:
        value = repr(fields.get(name))[:80]
        expected = "1 to 200 letters, digits and . _ : / -" if name == "lora_name" else "a path"
        raise ApiError(f"{name} is {value}; it must be {expected}", param=name) from None
