"""The live sockets' addresses, and the check of who may open one from a page; logins are
`consumers`'.
"""

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
    """Refuses (403) sockets that a page of a foreign host opens with its visitor's cookies.

    Browsers always send an Origin; programs with a bearer token send none, and carry no cookies to
    be abused.
    """

    def valid_origin(self, parsed_origin: Any) -> bool:
        return parsed_origin is None or bool(super().valid_origin(parsed_origin))


def application() -> Any:
    """The websocket side of the web process."""
    return PageOriginValidator(AuthMiddlewareStack(URLRouter(urlpatterns)), settings.ALLOWED_HOSTS)
