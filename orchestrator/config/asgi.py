"""The ASGI application: pages and REST, served models below /serve/, live topics on websockets."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

pages = get_asgi_application()

from orchestrator.api import serve
from webui.live import routing


async def http(scope: Any, receive: Any, send: Any) -> None:
    """Bypass Django for served models: its middleware would hold a thread per stream."""
    await (serve.application if scope["path"].startswith("/serve/") else pages)(
        scope, receive, send
    )


application = ProtocolTypeRouter(
    {"http": http, "websocket": routing.application(), "lifespan": serve.application},
)
