"""Errors for clients: OpenAI's error object and status.

The shape is `{"error": {"message", "type", "param", "code"}}`
(platform.openai.com/docs/guides/error-codes); clients choose an exception class by status alone.
"""

from __future__ import annotations

from typing import Any

_MAX_MESSAGE = 1_000  # characters: does not echo what a client sent in full
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An error response; `param` names the wrong field of the request."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        is_short = len(message) <= _MAX_MESSAGE
        super().__init__(message if is_short else f"{message[: _MAX_MESSAGE - 3]}...")
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, fallback)
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def engine_error(error: Exception) -> ApiError:
    """The response to an error inside the engine."""
    return ApiError(
        f"the engine failed: {type(error).__name__}: {str(error)[:300]}; see the run's log",
        status=500,
        code="engine_error",
    )
