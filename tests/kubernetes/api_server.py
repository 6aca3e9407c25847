"""A small Kubernetes API server on loopback: objects, watches with resource versions, errors.

It plays the conversation of a real one: list, watch, bookmarks, 410 Gone, conflicts, 401, 403.
Objects that are created must be valid against the published schemas.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes import schemas

KINDS = {
    "secrets": "Secret",
    "pods": "Pod",
    "jobsets": "JobSet",
    "workloads": "Workload",
    "localqueues": "LocalQueue",
    "clusterqueues": "ClusterQueue",
    "nodes": "Node",
}
Object = dict[str, Any]


class Refused(Exception):
    """An answer with a status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": code,
        }


class ApiServer:
    """Objects by plural and name. `refuse` maps (method, plural) to an error to answer with."""

    def __init__(self, *, token: str = "secret-token") -> None:
        self.token = token
        self.kueue_versions = ["v1beta1", "v1beta2"]
        self.refuse: dict[tuple[str, str], Refused] = {}
        self.requests: list[tuple[str, str]] = []
        self.created: list[Object] = []
        self.on_created: Callable[[str, Object], None] = lambda plural, item: None
        self._objects: dict[str, dict[str, Object]] = {plural: {} for plural in KINDS}
        self._events: list[tuple[int, str, str, Object]] = []
        self._version, self._oldest = 100, 0
        self.changed = threading.Condition(threading.RLock())
        self._closed = False
        self._streams = 0
        handler = type("Handler", (_Handler,), {"server_state": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def get(self, plural: str, name: str) -> Object:
        with self.changed:
            if name not in self._objects[plural]:
                raise Refused(404, "NotFound", f'{plural} "{name}" not events')
            return json.loads(json.dumps(self._objects[plural][name]))

    def items(self, plural: str) -> list[Object]:
        with self.changed:
            return json.loads(json.dumps(list(self._objects[plural].values())))

    def put(self, plural: str, item: Object) -> Object:
        """Create or replace an object, as a controller would."""
        with self.changed:
            name = item["metadata"]["name"]
            before = self._objects[plural].get(name)
            self._version += 1
            metadata = item["metadata"]
            metadata.setdefault("uid", str(uuid.uuid4()))
            metadata.setdefault("creationTimestamp", now())
            metadata["resourceVersion"] = str(self._version)
            self._objects[plural][name] = item
            self._record("MODIFIED" if before else "ADDED", plural, item)
            return item

    def change(self, plural: str, name: str, **parts: Any) -> Object:
        """Merge `spec`, `status` or `metadata` into an object."""
        with self.changed:
            item = self.get(plural, name)
            for part, values in parts.items():
                item[part] = {**item.get(part, {}), **values}
            return self.put(plural, item)

    def remove(self, plural: str, name: str) -> None:
        """Delete an object and what it owns."""
        with self.changed:
            item = self._objects[plural].pop(name, None)
            if item is None:
                return
            self._version += 1
            item["metadata"]["resourceVersion"] = str(self._version)
            self._record("DELETED", plural, item)
            uid = item["metadata"]["uid"]
            for other in ("secrets", "workloads"):
                for one in list(self._objects[other].values()):
                    owners = one["metadata"].get("ownerReferences") or []
                    if any(owner["uid"] == uid for owner in owners):
                        self.remove(other, one["metadata"]["name"])

    def forget_events(self) -> None:
        """Compact the history: watches from an older resource version get 410 Gone."""
        with self.changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self.changed.notify_all()

    def end_watches(self) -> None:
        """Close all streams, as a load balancer does."""
        with self.changed:
            self._streams += 1
            self.changed.notify_all()

    def _record(self, kind: str, plural: str, item: Object) -> None:
        self._events.append((self._version, plural, kind, json.loads(json.dumps(item))))
        self.changed.notify_all()

    # --- requests

    def answer(self, method: str, path: str, query: Object, body: Any) -> tuple[int, Object]:
        parts = [part for part in path.split("/") if part]
        if path == "/version":
            return 200, {"gitVersion": "v1.34.1"}
        if path == "/apis/kueue.x-k8s.io":
            versions = [{"version": one} for one in self.kueue_versions]
            return 200, {"kind": "APIGroup", "versions": versions}
        plural, name = self.resource(parts)
        if refusal := self.refuse.get((method, plural)):
            raise refusal
        with self.changed:
            if method == "GET" and not name:
                return 200, self._list(plural, query)
            if method == "GET":
                return 200, self.get(plural, name)
            if method == "POST":
                return 201, self._create(plural, body)
            if method == "PATCH":
                item = self.get(plural, name)
                item["metadata"] |= body.get("metadata", {})
                return 200, self.put(plural, item)
            self.get(plural, name)
            self.on_created(f"delete {plural}", {"name": name, **(body or {})})
            self.remove(plural, name)
            return 200, {"kind": "Status", "status": "Success"}

    def resource(self, parts: list[str]) -> tuple[str, str]:
        index = next((i for i, part in enumerate(parts) if part in KINDS), None)
        if index is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if parts[1] == "kueue.x-k8s.io" and parts[2] not in self.kueue_versions:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return parts[index], "/".join(parts[index + 1 :])

    def _list(self, plural: str, query: Object) -> Object:
        chosen = [one for one in self._objects[plural].values() if selects(query, one)]
        start, size = int(query.get("continue") or 0), int(query.get("limit") or 500)
        metadata: Object = {"resourceVersion": str(self._version)}
        if start + size < len(chosen):
            metadata["continue"] = str(start + size)
        items = json.loads(json.dumps(chosen[start : start + size]))
        return {"kind": f"{KINDS[plural]}List", "metadata": metadata, "items": items}

    def _create(self, plural: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        if wrong := schemas.problems(body):
            raise Refused(422, "Invalid", f'{KINDS[plural]} "{name}" is invalid: {wrong}')
        if name in self._objects[plural]:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        self.created.append(json.loads(json.dumps(body)))
        made = self.put(plural, body)
        self.on_created(plural, made)
        return made

    def stream(self, plural: str, query: Object, write: Callable[[Object], None]) -> None:
        version = int(query.get("resourceVersion") or 0)
        with self.changed:
            generation = self._streams
            if version < self._oldest:
                write({"type": "ERROR", "object": Refused(410, "Expired", "too old").status})
                return
        while True:
            with self.changed:
                events = [one for one in self._events if one[0] > version and one[1] == plural]
                if not events:
                    if self._closed or generation != self._streams or version < self._oldest:
                        return
                    self.changed.wait(5)
                    continue
            for version, _, kind, item in events:  # noqa: B007
                if selects(query, item):
                    write({"type": kind, "object": item})
            bookmark = {"kind": KINDS[plural], "metadata": {"resourceVersion": str(version)}}
            write({"type": "BOOKMARK", "object": bookmark})


def selects(query: Object, item: Object) -> bool:
    labels = item["metadata"].get("labels") or {}
    pairs = [one.split("=") for one in str(query.get("labelSelector") or "").split(",") if one]
    return all(labels.get(name) == value for name, value in pairs)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: ApiServer

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        state = self.server_state
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        state.requests.append((self.command, parts.path))
        try:
            if self.headers.get("Authorization") != f"Bearer {state.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            if query.get("watch"):
                plural, _ = state.resource([part for part in parts.path.split("/") if part])
                if refusal := state.refuse.get(("WATCH", plural)):
                    raise refusal
                self._stream(plural, query)
                return
            code, answer = state.answer(self.command, parts.path, query, body)
        except Refused as refusal:
            code, answer = refusal.code, refusal.status
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _stream(self, plural: str, query: Object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

        def write(event: Object) -> None:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()

        try:
            self.server_state.stream(plural, query, write)
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
