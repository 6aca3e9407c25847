"""Reads a request's body, bounded, and parses it as JSON that can be encoded as UTF-8."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from workers.inference.server.http.errors import ApiError

MAX_BODY_BYTES = 32 << 20


async def read_body(request: Request) -> bytes:
    """The request's body. Raises ApiError if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(
                f"the body is larger than {MAX_BODY_BYTES:,} bytes; send less", status=413
            )
        parts.append(part)
    return b"".join(parts)


def parse_json(body: bytes) -> Any:
    """The body as JSON. Raises ApiError."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            # reject lone surrogates: they cannot be encoded as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise ApiError(
            f"We could not parse the JSON body of your request: {str(error)[:200]}"
        ) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
