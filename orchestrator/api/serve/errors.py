"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

# status → type, as at api.openai.com
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A call that is not forwarded: the message says what is wrong and what to do next."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retry_after_s = (
            status,
            code,
            message,
            retry_after_s,
        )

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        kind = _TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    @property
    def headers(self) -> list[Header]:
        """The response headers."""
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="orrery"'))
        return headers


async def send_error(send: Send, error: ApiError) -> None:
    """Send the error as the complete response."""
    await send_start(
        send,
        error.status,
        [*error.headers, (b"content-length", str(len(error.body)).encode())],
    )
    await send({"type": "http.response.body", "body": error.body})


async def send_start(send: Send, status: int, headers: Iterable[Header]) -> None:
    """Send status and headers of a response."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
