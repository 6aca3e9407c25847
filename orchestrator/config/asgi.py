"""The web process: pages and REST over HTTP, live topics over websockets."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

http = get_asgi_application()

from webui import sockets

application = ProtocolTypeRouter({"http": http, "websocket": sockets.application()})
