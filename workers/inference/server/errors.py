"""What a client is told when it cannot have what it asked for: OpenAI's error object and status.

The shape is `{"error": {"message", "type", "param", "code"}}`
(platform.openai.com/docs/guides/error-codes); clients
choose an exception class by the status alone.
"""

from __future__ import annotations

from typing import Any

_MOST = 1_000  # characters of a message: what a client sent is not sent back whole
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """`status` below 500 is the client's doing; `param` names the field of its request that is
    wrong.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message if len(message) <= _MOST else f"{message[: _MOST - 3]}...")
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        found = (
            {}
            if self.retry_after_s is None
            else {"retry-after": str(max(1, round(self.retry_after_s)))}
        )
        return {**found, "www-authenticate": "Bearer"} if self.status == 401 else found
