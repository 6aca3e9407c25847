"""Which requests a busy web process refuses, the responses, and their count.

The event loop builds the responses itself: no thread and no database is needed to refuse.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.http import HttpResponse

from orchestrator.api.http import overload
from orchestrator.api.http.problems import MEDIA_TYPE
from orchestrator.common import live
from orchestrator.config.security_headers import with_policy

log = logging.getLogger(__name__)

_COUNT_S = 1.0  # between two additions to the total
# what stops a run must not wait for readers, nor what a person does to runs; sweeps have `cancel`
_URGENT = re.compile(r"/cancel/?$|/runs/.*/(?:pause|resume|retry)/?$|/act/$")


def is_urgent(scope: Any) -> bool:
    """Health and actions on runs: never refused, on threads of their own."""
    path = str(scope["path"])
    if scope["method"] == "POST":
        return _URGENT.search(path) is not None
    return path == "/health/"


def is_metrics(scope: Any) -> bool:
    """Never refused either, on a thread of its own: it reads much."""
    return bool(scope["method"] != "POST" and scope["path"] == "/metrics")


def may_refuse(scope: Any) -> bool:
    """Not files of pages: they are cheap, and a page without its styles cannot be read."""
    return not str(scope["path"]).startswith(settings.STATIC_URL)


def response(scope: Any) -> HttpResponse:
    """503: problem details for REST, a page for browsers."""
    path, headers = str(scope["path"]), {"Retry-After": str(overload.RETRY_AFTER_S)}
    if path.startswith("/api/"):
        body = live.dumps(overload.refusal().problem(path))
        answer = HttpResponse(body, status=503, content_type=MEDIA_TYPE, headers=headers)
    else:
        answer = HttpResponse(_page(), status=503, headers=headers)
    answer["Cache-Control"] = "no-store"
    answer["Content-Length"] = str(len(answer.content))  # as Django's middleware does
    with_policy(answer)
    return answer


class RefusedRequests:
    """Counts refused requests of one event loop and adds them to the total every second."""

    def __init__(self) -> None:
        self._count = 0
        self._due: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """Count one."""
        self._count += 1
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_COUNT_S, self._send)

    def _send(self) -> None:
        self._due, count = None, self._count
        self._count = 0
        log.warning("Refused %d requests: too many wait for a thread", count)
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, overload.add_refused, count)


@lru_cache(maxsize=1)
def _page() -> str:
    from webui.views.outages import busy_page  # after the URL configuration

    return busy_page()
