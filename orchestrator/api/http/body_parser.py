"""Parses request bodies: gzip or plain, UTF-8, JSON, with a limit on the decompressed size."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja.parser import Parser

from orchestrator.api.http.problems import refuse
from workers.contracts.wire.points import depth

MAX_DEPTH = 60  # of nested objects and lists; events may have 50
MAX_EXPANSION = 4  # a packed body may unpack to so many times the limit of plain ones
# every escape of a JSON text; a surrogate pair is one escape
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|u0000|.)",
    re.DOTALL,
)


class BodyParser(Parser):
    """ninja's parser for our request bodies."""

    def parse_body(self, request: HttpRequest) -> Any:
        """The JSON body. Raises Refusal 400, 413 or 415; ninja maps every other error to 400."""
        text = decompress(request).decode("utf-8")
        if "\\u" in text:
            text = _ESCAPE.sub(_storable, text)
        try:
            data = json.loads(text)
        except RecursionError:
            raise _too_deep() from None
        if text.count("[") + text.count("{") > MAX_DEPTH and depth(data) > MAX_DEPTH:
            raise _too_deep()
        return data


def decompress(request: HttpRequest) -> bytes:
    """The decompressed body. Raises Refusal 400, 413 or 415."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return request.body
    if encoding not in ("gzip", "x-gzip"):
        raise refuse(
            "encoding-unknown",
            "The body's encoding is not known",
            415,
            f"Content-Encoding {encoding!r} is not supported; send gzip or an uncompressed body.",
        )
    return _gunzip(request.body, limit=MAX_EXPANSION * int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE))


def _gunzip(compressed: bytes, *, limit: int) -> bytes:
    """All members of a gzip stream; stops as soon as the limit is exceeded."""
    parts, size = [], 0
    while compressed:
        stream = zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(compressed, limit - size + 1)
        except zlib.error as error:
            raise _broken(str(error)) from None
        size += len(part)
        if size > limit:
            raise refuse(
                "body-too-large",
                "The body is too large",
                413,
                f"The body decompresses to more than {limit / 1e6:g} MB. Send it in smaller parts.",
            )
        if not stream.eof:
            raise _broken("it ends too early")
        parts.append(part)
        compressed = stream.unused_data
    return b"".join(parts)


def _too_deep() -> Exception:
    return refuse(
        "nested-too-deep",
        "The body is nested too deep",
        422,
        f"Objects and lists may be nested {MAX_DEPTH} levels deep. Send flatter data.",
    )


def _broken(why: str) -> Exception:
    return refuse(
        "malformed-body",
        "The body is not gzip",
        400,
        f"Content-Encoding is gzip, but the body is not: {why}.",
    )


def _storable(escape: re.Match[str]) -> str:
    """Replace U+0000 and lone surrogates, which no database stores as text, by U+FFFD."""
    text = escape.group()
    unstorable = len(text) == 6 and (text == "\\u0000" or text[2] in "dD")
    return "\\ufffd" if unstorable else text
