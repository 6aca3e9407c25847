"""ETags: `"<version>-<digest>"`. User edits raise the version; every change changes the digest.

A run's state and numbers change constantly, so If-Match (for PATCH) compares versions only.
If-None-Match compares the full tag, so polling an unchanged object returns 304 without a body.
"""

from __future__ import annotations

import hashlib
import re

from django.http import HttpRequest, HttpResponse, HttpResponseNotModified

from orchestrator.api.http.problems import invalid, refuse
from orchestrator.api.http.responses import json_response
from orchestrator.common import live

_TAG = re.compile(r'(?:W/)?"(\d{1,18})(?:-[0-9a-f]+)?"')


def etag(version: int, body: object) -> str:
    """The ETag of a response body."""
    return f'"{version}-{hashlib.sha256(live.dumps(body).encode()).hexdigest()[:12]}"'


def matches(request: HttpRequest, tag: str) -> bool:
    """Whether If-None-Match names this tag; a proxy's prefix `W/` is ignored."""
    tags = request.headers.get("If-None-Match", "").split(",")
    return any(item.strip().removeprefix("W/") == tag for item in tags)


def etag_response(request: HttpRequest, body: object, version: int) -> HttpResponse:
    """The body with its ETag; 304 without body for a GET with a matching If-None-Match."""
    tag = etag(version, body)
    if request.method == "GET" and matches(request, tag):
        unchanged = HttpResponseNotModified()
        unchanged["ETag"] = tag
        return unchanged
    return json_response(body, headers={"ETag": tag})


def if_match_version(request: HttpRequest) -> int | None:
    """The version in If-Match; None without the header or with `*`. 422 for a malformed tag."""
    value = request.headers.get("If-Match", "").strip()
    if value in ("", "*"):
        return None
    match = _TAG.fullmatch(value)
    if match is None:
        raise invalid(
            "If-Match",
            f"{value[:60]!r} is not an ETag of this API",
            "Send the ETag header of a GET, or omit If-Match.",
        )
    return int(match[1])


def check_version(expected: int | None, version: int, what: str) -> None:
    """412 if the object was edited since the expected version."""
    if expected is not None and expected != version:
        raise refuse(
            "edited-meanwhile",
            "It was edited meanwhile",
            412,
            f"{what} is at version {version}, your If-Match names {expected}. Read it again, then "
            "repeat your change.",
        )
