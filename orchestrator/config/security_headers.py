"""Adds the Content-Security-Policy to every response.

Scripts come from this server's files only, never inline. Styles may be inline: charts set positions
in `style` attributes, and Plotly adds a style sheet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Final
from urllib.parse import urlsplit

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware


def _provider() -> tuple[str, ...]:
    """The origin of the identity provider."""
    parts = urlsplit(settings.ENV.oidc_issuer)
    return (f"{parts.scheme}://{parts.netloc}",) if parts.netloc else ()


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        # a form starts the login at an identity provider, which browsers count as its target
        " ".join(("form-action 'self'", *_provider())),
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "manifest-src 'self'",
    )
)
_HEADER: Final = "Content-Security-Policy"

Handler = Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]


@sync_and_async_middleware
def content_security_policy(get_response: Handler) -> Handler:
    """Middleware that adds the policy."""
    if iscoroutinefunction(get_response):

        async def answer_later(request: HttpRequest) -> HttpResponseBase:
            return with_policy(await get_response(request))

        return answer_later

    def answer(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        assert isinstance(response, HttpResponseBase)
        return with_policy(response)

    return answer


def with_policy(response: HttpResponseBase) -> HttpResponseBase:
    """The response with the policy."""
    response.headers.setdefault(_HEADER, POLICY)
    return response
