"""A small HTTP server that accepts runs, points, events and logs like Orrery's REST API."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "orr_test"
LISTS = {
    "details": "details",
    "points": "points",
    "events": "events",
    "logs": "lines",
    "media": "media",
}


class Ingest(ThreadingHTTPServer):
    """`store[run][kind]` maps (rank, seq) to an item; `refuse` holds answers to give first:
    (status, headers).
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, str] = {}
        self.store: dict[str, dict[str, dict[tuple[int, int], Any]]] = {}
        self.ends: dict[str, Any] = {}
        self.calls: list[tuple[str, int]] = []
        self.refuse: list[tuple[int, dict[str, str]]] = []
        self.unknown: set[str] = set()  # fields of specs that are refused
        self.duplicates = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def points(self, run: str | None) -> list[dict[str, Any]]:
        result = self.store[str(run)]["points"]
        return [result[key] for key in sorted(result)]


class Handler(BaseHTTPRequestHandler):
    server: Ingest

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(
            gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
        )
        with self.server.lock:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                return self.answer(401, {"detail": "The token is not known."})
            if self.server.refuse:
                status, headers = self.server.refuse.pop(0)
                return self.answer(status, {"detail": "Refused by the test."}, headers)
            self.answer(*self.take(self.path.removeprefix("/api/v1/").split("/"), body))

    def take(self, path: list[str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server = self.server
        if path == ["runs"]:
            if unknown := sorted(each for each in server.unknown if _has(body["spec"], each)):
                errors = [{"field": each, "message": "unknown"} for each in unknown]
                return 422, {
                    "detail": f"{unknown[-1]} is not a field of this contract.",
                    "errors": errors,
                }
            key = self.headers["Idempotency-Key"]
            run = server.by_key.setdefault(key, f"r{len(server.by_key) + 1}")
            server.runs[run] = body
            server.store.setdefault(run, {kind: {} for kind in LISTS})
            return 201, {"id": run, "state": "running"}
        _, run, kind = path
        if run not in server.runs:
            return 404, {"detail": f"There is no run {run}."}
        if kind == "finish":
            server.ends[run] = body
            return 200, {"id": run}
        items = body[LISTS[kind]]
        server.calls.append((kind, len(items)))
        if len(items) > 10_000:
            return 413, {"detail": "At most 10,000 a call."}
        if any(item.get("type") == "poison" for item in items):
            return 422, {"detail": "An unknown event type."}
        known = server.store[run][kind]
        fresh = {
            (item["rank"], item["seq"]): item
            for item in items
            if (item["rank"], item["seq"]) not in known
        }
        server.duplicates += len(items) - len(fresh)
        known.update(fresh)
        return 200, {"accepted": len(fresh), "duplicates": len(items) - len(fresh), "rejected": []}

    def answer(
        self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(text)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


def _has(spec: Any, field: str) -> bool:
    first, _, rest = field.partition(".")
    if not rest:
        return isinstance(spec, dict) and any(each.rstrip(".") == first for each in spec)
    return isinstance(spec, dict) and _has(spec.get(first), rest)


@contextmanager
def serving(server: Ingest) -> Iterator[Ingest]:
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
