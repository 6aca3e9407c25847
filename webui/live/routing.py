"""URLs of the live sockets and their origin check; `consumers` authenticates."""

from __future__ import annotations

from typing import Any

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import OriginValidator
from django.conf import settings
from django.urls import path

from webui.live.consumers import FleetConsumer, RunConsumer

urlpatterns = [
    path("ws/runs/<str:id>/", RunConsumer.as_asgi()),
    path("ws/fleet/", FleetConsumer.as_asgi()),
]


class PageOriginValidator(OriginValidator):  # type: ignore[misc]
    """Refuse (403) sockets that pages of other hosts open with a visitor's cookies.

    Browsers always send an Origin; programs with a bearer token send neither Origin nor cookies.
    """

    def valid_origin(self, parsed_origin: Any) -> bool:
        """Whether the Origin is missing or one of our hosts."""
        return parsed_origin is None or bool(super().valid_origin(parsed_origin))


def application() -> Any:
    """Return the websocket application of the web process."""
    return PageOriginValidator(AuthMiddlewareStack(URLRouter(urlpatterns)), settings.ALLOWED_HOSTS)
