"""Calls that load and unload adapters: who may, and which files, before they are forwarded.

Only users who may manage the run; the run's own key may not, since the server reads node's files.
"""

from __future__ import annotations

import json
from typing import Any, Final

from channels.db import database_sync_to_async

from orchestrator.api.serve.callers import Caller
from orchestrator.api.serve.errors import ApiError, Message, Receive, Scope
from orchestrator.common.errors import Refusal
from orchestrator.runs import services as runs
from workers.contracts.wire.serving_reports import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH

PATHS: Final = (LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH)
_MOST_BYTES: Final = 64 << 10


async def checked(scope: Scope, receive: Receive, path: str, caller: Caller) -> Receive:
    """The call's body with an absolute path, to forward. Raises ApiError 400, 403, 405 or 413."""
    if scope["method"] != "POST":
        raise ApiError(405, "method_not_allowed", f"{scope['method']} is not allowed; use POST.")
    if caller.user is None:
        raise ApiError(
            403,
            "user_required",
            "The run's key cannot load or unload adapters. Use an Orrery token of its owner.",
        )
    fields = await _fields(receive)
    name = fields.get("lora_name")
    allowed = database_sync_to_async(_allowed, thread_sensitive=False)
    fields = await allowed(caller, path, str(name)[:200], fields)
    body = json.dumps(fields).encode()
    scope["headers"] = [
        (key, str(len(body)).encode() if key.lower() == b"content-length" else value)
        for key, value in scope["headers"]
        if key.lower() != b"transfer-encoding"
    ]
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _allowed(caller: Caller, path: str, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    assert caller.user is not None
    try:
        if path == UNLOAD_ADAPTER_PATH:
            runs.adapter_unload(run=caller.run, by=caller.user, name=name)
            return fields
        if not isinstance(fields.get("lora_path"), str):
            raise ApiError(400, "invalid_value", "lora_path must be the path of an adapter.")
        resolved = runs.adapter_load(
            run=caller.run, by=caller.user, name=name, path=fields["lora_path"]
        )
        return {**fields, "lora_path": resolved}
    except Refusal as refusal:
        status = 403 if refusal.status == 403 else 400
        message = "; ".join(f"{each['message']}. {each['hint']}" for each in refusal.errors) or str(
            refusal.detail
        )
        raise ApiError(status, refusal.type, message) from None


async def _fields(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "disconnected", "The client disconnected.")
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > _MOST_BYTES:
            raise ApiError(413, "body_too_large", "The body is larger than 64 kB. Send less.")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"The body is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "The body is not a JSON object.")
    return fields
