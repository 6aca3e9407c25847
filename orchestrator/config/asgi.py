"""The ASGI application: pages and REST, served models below /serve/, live topics on websockets."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from typing import Any

gc.disable()  # until everything is loaded
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")

import django
from channels.routing import ProtocolTypeRouter

django.setup(set_prefix=False)

from django.urls import get_resolver

from orchestrator.api import serve
from orchestrator.common.processes.garbage_collection import exclude_loaded_objects
from orchestrator.config.request_handler import RequestHandler
from webui.live import routing

_SWITCH_S = 0.0005
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

pages = RequestHandler()


def _end_with_parent() -> None:
    """Let one of several web processes end with the process that started it.

    Otherwise, if that is killed, the others would hold the port, and it could not start again.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent.pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


_end_with_parent()
# a request that waits for the database gets the interpreter back sooner from those that compute,
# so transactions, and the locks that they hold, are shorter
sys.setswitchinterval(_SWITCH_S)


get_resolver().url_patterns  # noqa: B018 -- loads all views
exclude_loaded_objects()
gc.enable()


async def http(scope: Any, receive: Any, send: Any) -> None:
    """Bypass Django for served models: its middleware would hold a thread per stream."""
    await (serve.application if scope["path"].startswith("/serve/") else pages)(
        scope, receive, send
    )


application = ProtocolTypeRouter(
    {"http": http, "websocket": routing.application(), "lifespan": serve.application},
)
