"""ETags: `"<version>-<digest>"`. The version moves with people's edits and guards PATCH, the digest
with any change.

A run's state and numbers move by themselves all the time; an If-Match therefore compares versions
only, while an
If-None-Match compares the whole tag, so that polling an unchanged thing costs 304 and no body.
"""

from __future__ import annotations

import hashlib
import re

from django.http import HttpRequest, HttpResponse, HttpResponseNotModified

from orchestrator.api.http.problems import invalid, refuse
from orchestrator.api.http.responses import json_answer
from orchestrator.common import live

_TAG = re.compile(r'(?:W/)?"(\d{1,18})(?:-[0-9a-f]+)?"')


def etag(version: int, body: object) -> str:
    return f'"{version}-{hashlib.sha256(live.dumps(body).encode()).hexdigest()[:12]}"'


def matches(request: HttpRequest, tag: str) -> bool:
    """Whether the caller's copy is still good (If-None-Match); a proxy's `W/` before it does not
    matter.
    """
    given = request.headers.get("If-None-Match", "")
    return any(item.strip().removeprefix("W/") == tag for item in given.split(","))


def tagged_answer(request: HttpRequest, body: object, version: int) -> HttpResponse:
    """The body under its ETag; 304 without it for a GET by whoever has it already."""
    tag = etag(version, body)
    if request.method == "GET" and matches(request, tag):
        unchanged = HttpResponseNotModified()
        unchanged["ETag"] = tag
        return unchanged
    return json_answer(body, headers={"ETag": tag})


def wanted_version(request: HttpRequest) -> int | None:
    """The version that If-Match demands; None without the header or with `*`.

    422 for anything else but our tags.
    """
    given = request.headers.get("If-Match", "").strip()
    if given in ("", "*"):
        return None
    found = _TAG.fullmatch(given)
    if found is None:
        raise invalid(
            "If-Match",
            f"{given[:60]!r} is not an ETag of ours",
            "the ETag header of a GET, or no If-Match",
        )
    return int(found[1])


def check_version(wanted: int | None, version: int, what: str) -> None:
    """412 when somebody else's edit came first."""
    if wanted is not None and wanted != version:
        raise refuse(
            "edited-meanwhile",
            "Somebody else edited it meanwhile",
            412,
            f"{what} is at version {version}, your If-Match names {wanted}. Read it again, then "
            "send your change anew.",
        )
