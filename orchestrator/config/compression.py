"""Compresses responses with gzip.

Pages carry secrets such as CSRF tokens. Compression does not reveal them (BREACH): Django masks the
tokens differently in every response, and the gzip header has up to 100 random bytes.
"""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware

_TYPES: Final = (
    "text/",
    "application/json",
    "application/problem+json",
    "application/javascript",
    "image/svg+xml",
)


class CompressionMiddleware(GZipMiddleware):
    """Compresses text; streams stay as they are, since a buffer would delay their events."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> Any:
        """The response, compressed if the client accepts it and it becomes shorter."""
        if response.streaming or not response.get("Content-Type", "").startswith(_TYPES):
            return response
        return super().process_response(request, response)
