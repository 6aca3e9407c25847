"""URLs of the live sockets and their origin check; `consumers` authenticates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from django.http.request import split_domain_port, validate_host
from django.urls import path, re_path

from webui.live.consumers import NOT_FOUND, FleetConsumer, RunConsumer

log = logging.getLogger(__name__)

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
TRY_LATER = 1013
_DEFAULT_PORTS = {"http": "80", "https": "443"}


async def unknown_path(scope: Any, receive: Any, send: Any) -> None:
    """Refuse the handshake of a socket on a path that does not exist."""
    await receive()
    await send({"type": "websocket.close", "code": NOT_FOUND})


urlpatterns = [
    path("ws/runs/<str:id>/", RunConsumer.as_asgi()),
    path("ws/fleet/", FleetConsumer.as_asgi()),
    re_path(r"(?s).*", unknown_path),  # type: ignore[arg-type]
]


class PageOriginCheck:
    """Refuses (403) sockets that pages of other origins open with a visitor's cookies.

    Browsers always send an Origin; programs with a bearer token send neither Origin nor cookies.
    Scheme, host and port count: another service on this host is another origin.
    """

    def __init__(self, inner: Asgi) -> None:
        self.inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the socket on, or refuse its handshake."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if _same_origin(headers.get(b"origin"), headers.get(b"host", "")):
            await self.inner(scope, receive, send)
            return
        await receive()
        await send({"type": "websocket.close", "code": 1008})


def _same_origin(origin: str | None, host: str) -> bool:
    """Whether the Origin is missing, this server's own, or one of ORRERY_TRUSTED_ORIGINS."""
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
        port = str(parts.port or _DEFAULT_PORTS[parts.scheme])
    except (ValueError, KeyError):
        return False
    if origin.lower() in {trusted.lower() for trusted in settings.CSRF_TRUSTED_ORIGINS}:
        return True
    name, own_port = split_domain_port(host)
    return (
        bool(name)
        and validate_host(name, settings.ALLOWED_HOSTS)
        and _name(parts) == name
        and port == (own_port or _DEFAULT_PORTS[parts.scheme])
    )


def _name(parts: SplitResult) -> str:
    name = (parts.hostname or "").lower()
    return f"[{name}]" if ":" in name else name


class DatabaseOutage:
    """Closes a socket that cannot be served without the database; its client connects again."""

    def __init__(self, inner: Asgi) -> None:
        self.inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the socket on."""
        try:
            await self.inner(scope, receive, send)
        except (DatabaseError, InterfaceError) as error:
            log.warning("A live socket is closed: the database does not answer: %s", error)
            with contextlib.suppress(RuntimeError):  # it is closed already
                await send({"type": "websocket.close", "code": TRY_LATER})


def application() -> Any:
    """Return the websocket application of the web process."""
    return PageOriginCheck(DatabaseOutage(AuthMiddlewareStack(URLRouter(urlpatterns))))
