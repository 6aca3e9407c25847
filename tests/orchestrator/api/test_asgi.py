"""Responses through ASGI: streams are streamed, chunked bodies are limited."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.db import connections

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.telemetry import services as telemetry
from tests import factories
from workers.contracts.wire.points import PointBatch


def call(
    token: str, method: str, path: str, *chunks: bytes, query: str = ""
) -> tuple[int, list[bytes]]:
    """Status and body chunks of the response to a request with a chunked body."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", f"Bearer {token}".encode()),
            (b"content-type", b"application/json"),
            (b"accept", b"text/csv" if "raw" in query else b"*/*"),
        ],
    }

    async def talk() -> tuple[int, list[bytes]]:
        talker = ApplicationCommunicator(get_asgi_application(), scope)
        for chunk in chunks:
            await talker.send_input({"type": "http.request", "body": chunk, "more_body": True})
        await talker.send_input({"type": "http.request", "body": b"", "more_body": False})
        start = await talker.receive_output(90)
        parts, more = [], True
        while more:
            part = await talker.receive_output(90)
            more = part.get("more_body", False)
            parts.append(part.get("body", b""))
        await talker.wait(90)
        return int(start["status"]), [part for part in parts if part]

    return asyncio.run(talk())


@pytest.mark.django_db(transaction=True)
def test_streams_and_chunked_bodies(
    owner: User, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # requests' threads end with the test
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    _, token = accounts.token_create(user=owner, name="program", by=owner)
    run = factories.external_run(owner)
    steps = list(range(1, 10_001))
    batch = PointBatch(
        run=str(run.pk),
        attempt=1,
        rank=0,
        seq=steps,
        step=steps,
        tokens=steps,
        time=[1.79e9] * len(steps),
        values={"loss": [1.5] * len(steps)},
    )
    telemetry.points_store(run=run, attempt=1, batches=[batch])
    status, parts = call(token, "GET", f"/api/v1/runs/{run.pk}/series", query="name=loss&raw=1")
    assert status == 200 and len(parts) > 2
    assert b"".join(parts).count(b"\n") == 10_001

    body = json.dumps({"name": "chunked", "spec": factories.spec()}).encode()
    status, parts = call(token, "POST", "/api/v1/runs", body[:40], body[40:])
    assert status == 201 and json.loads(b"".join(parts))["name"] == "chunked"
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10_000
    status, parts = call(token, "POST", "/api/v1/runs", *[b" " * 1000] * 11, body)
    assert status == 413 and json.loads(b"".join(parts))["type"].endswith("/body-too-large")
    assert Run.objects.filter(name="chunked").count() == 1
