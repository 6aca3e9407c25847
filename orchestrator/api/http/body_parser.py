"""Reads a request's body: gzip or plain, UTF-8, JSON, within bounds also once it is unpacked.

Knows no contract.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja.parser import Parser

from orchestrator.api.http.problems import refuse

UNPACKED = 4  # a packed body may unpack to so many times the limit of plain ones
# every escape of a JSON text, pairs of surrogates as one
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|u0000|.)",
    re.DOTALL,
)


class BodyParser(Parser):
    def parse_body(self, request: HttpRequest) -> Any:
        """Raises Refusal 400, 413 or 415; ninja turns every other error into 400."""
        text = unpacked(request).decode("utf-8")
        if "\\u" in text:
            text = _ESCAPE.sub(_storable, text)
        return json.loads(text)


def unpacked(request: HttpRequest) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return request.body
    if encoding not in ("gzip", "x-gzip"):
        raise refuse(
            "encoding-unknown",
            "The body's encoding is not known",
            415,
            f"Content-Encoding {encoding!r} is not known here; send gzip, or the body as it is.",
        )
    return _gunzip(request.body, limit=UNPACKED * int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE))


def _gunzip(packed: bytes, *, limit: int) -> bytes:
    """All members of a gzip stream; stops unpacking as soon as the limit is passed."""
    parts, size = [], 0
    while packed:
        stream = zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(packed, limit - size + 1)
        except zlib.error as error:
            raise _broken(str(error)) from None
        size += len(part)
        if size > limit:
            raise refuse(
                "body-too-large",
                "The body is too large",
                413,
                f"The body unpacks to more than {limit / 1e6:g} MB. Send it in smaller parts.",
            )
        if not stream.eof:
            raise _broken("it ends too early")
        parts.append(part)
        packed = stream.unused_data
    return b"".join(parts)


def _broken(why: str) -> Exception:
    return refuse(
        "malformed-body",
        "The body is not gzip",
        400,
        f"Content-Encoding says gzip, but the body is not: {why}.",
    )


def _storable(escape: re.Match[str]) -> str:
    """U+0000 and halves of surrogate pairs, which no database keeps as text, become U+FFFD."""
    found = escape.group()
    alone = len(found) == 6 and (found == "\\u0000" or found[2] in "dD")
    return "\\ufffd" if alone else found
