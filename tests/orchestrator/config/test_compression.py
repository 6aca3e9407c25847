"""Compression of responses."""

from __future__ import annotations

import gzip

import pytest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import Client, RequestFactory

from orchestrator.config.compression import CompressionMiddleware

TEXT = b"a text of a page " * 100


def answer(response: HttpResponseBase, accepts: str = "gzip") -> HttpResponseBase:
    def view(request: HttpRequest) -> HttpResponseBase:
        return response

    request = RequestFactory().get("/", headers={"Accept-Encoding": accepts})
    result = CompressionMiddleware(view)(request)  # type: ignore[arg-type]
    assert isinstance(result, HttpResponseBase)
    return result


def test_text_is_compressed_with_a_random_length() -> None:
    for kind in ("text/html", "application/json; charset=utf-8", "image/svg+xml"):
        lengths = set()
        for _ in range(20):
            result = answer(HttpResponse(TEXT, content_type=kind))
            assert isinstance(result, HttpResponse) and result["Content-Encoding"] == "gzip"
            assert gzip.decompress(result.content) == TEXT
            lengths.add(len(result.content))
        assert len(lengths) > 3  # hides the length of secrets (BREACH)


def test_streams_pictures_and_short_texts_stay_as_they_are() -> None:
    plain = (
        StreamingHttpResponse(iter([TEXT]), content_type="text/event-stream"),
        HttpResponse(TEXT, content_type="image/png"),
        HttpResponse(b"short", content_type="text/html"),
    )
    for response in plain:
        assert not answer(response).has_header("Content-Encoding")
    assert not answer(HttpResponse(TEXT), accepts="identity").has_header("Content-Encoding")


@pytest.mark.django_db
def test_a_page_is_compressed() -> None:
    page = Client().get("/login/", headers={"Accept-Encoding": "gzip"})
    assert page["Content-Encoding"] == "gzip" and "Accept-Encoding" in page["Vary"]
