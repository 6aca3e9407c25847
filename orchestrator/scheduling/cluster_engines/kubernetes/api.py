"""Requests to a Kubernetes API server over httpx: paths, logins, errors as sentences.

Does not depend on the database. Of the API it needs six resources as plain JSON, so the generated
client of the whole API would add its size and little else.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from orchestrator.fleet.cluster_engines.kubeconfig import Login
from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable

JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"
PODS = "/api/v1/namespaces/{namespace}/pods"
SECRETS = "/api/v1/namespaces/{namespace}/secrets"
_POD_FILES = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_AGE_S = 60.0  # Kubernetes renews the file of a pod's token
_MERGE = {"Content-Type": "application/merge-patch+json"}


class ApiError(RuntimeError):
    """The server answered with an error: `code`, its `reason` and `message` in its words."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"HTTP {code}")
        self.code, self.reason = code, reason


class NoAnswer(EngineUnavailable):
    """The server did not answer; whether a change was made is unknown."""


@dataclass(frozen=True)
class Connection:
    """Where and how to reach a server."""

    login: Login
    namespace: str
    timeout_s: float


def in_cluster() -> Login:
    """The login of the pod that this process runs in. Raises EngineUnavailable outside of one."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host or not (_POD_FILES / "ca.crt").exists():
        raise EngineUnavailable(
            "The engine has no kubeconfig and no token, and the control plane does not run in a "
            "cluster. Set one: manage.py engine set NAME --kubeconfig FILE"
        )
    name = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Login(server=f"https://{name}:{port}", ca=(_POD_FILES / "ca.crt").read_text())


class Api:
    """One server; safe for several threads. Every method raises ApiError or NoAnswer."""

    def __init__(self, connection: Connection) -> None:
        self.namespace = connection.namespace
        self._login = connection.login
        self._file_token = ("", 0.0)
        self._lock = threading.Lock()
        self._streams: list[socket.socket] = []
        self._closed = False
        self._timeout = httpx.Timeout(connection.timeout_s)
        self._client = httpx.Client(
            base_url=connection.login.server,
            verify=_tls(connection.login),
            timeout=self._timeout,
            headers={"Accept": "application/json", "User-Agent": "orrery"},
            trust_env=False,
        )

    def end_watches(self) -> None:
        """Watches in other threads end with NoAnswer, and new ones do not begin."""
        with self._lock:
            self._closed = True
            for stream in self._streams:
                with contextlib.suppress(OSError):  # wakes the thread that reads from it
                    stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections.

        Call it when no other thread sends requests: a connection that one opens meanwhile would
        stay open.
        """
        self._client.close()

    def path(self, template: str, name: str = "") -> str:
        """The path of a resource of the namespace, or of one object."""
        base = template.format(namespace=self.namespace)
        return f"{base}/{name}" if name else base

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """An object or a list."""
        return self._call("GET", path, query=query)

    def create(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object."""
        return self._call("POST", path, body=body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge into an object."""
        return self._call("PATCH", path, body=body, headers=_MERGE)

    def delete(self, path: str, **options: Any) -> None:
        """Delete an object; one that does not exist is not an error."""
        try:
            self._call("DELETE", path, body={"propagationPolicy": "Background", **options})
        except ApiError as error:
            if error.code != 404:
                raise

    def items(self, path: str, **query: Any) -> tuple[list[dict[str, Any]], str]:
        """All objects of a list over its pages, and the list's resource version."""
        result: list[dict[str, Any]] = []
        page = self.get(path, limit=500, **query)
        while True:
            result += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return result, str(metadata.get("resourceVersion", ""))
            page = self.get(path, limit=500, **{**query, "continue": metadata["continue"]})

    @contextmanager
    def watch(self, path: str, *, seconds: int, **query: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Events as they arrive; the server ends the stream after `seconds`.

        Raises NoAnswer, ApiError.
        """
        values = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": seconds}
        read = httpx.Timeout(self._timeout.connect, read=seconds + 15.0)
        try:
            with self._client.stream(
                "GET", path, params=values, headers=self._authorization(), timeout=read
            ) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _error(response)
                with self._watched(response):
                    yield _events(response)
        except (httpx.HTTPError, httpx.StreamError, RuntimeError, OSError) as error:
            if isinstance(error, (ApiError, EngineUnavailable)):
                raise
            raise NoAnswer(_unreachable(self._login.server, error)) from None

    @contextmanager
    def _watched(self, response: httpx.Response) -> Iterator[None]:
        """Keep the response's socket, so that `end_watches` can end a read that waits."""
        connected = response.extensions["network_stream"].get_extra_info("socket")
        with self._lock:
            if self._closed:
                raise NoAnswer("The connection was closed")
            self._streams.append(connected)
        try:
            yield
        finally:
            with self._lock:
                self._streams.remove(connected)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            response = self._client.request(
                method,
                path,
                params=dict(query or {}),
                json=body,
                headers={**self._authorization(), **(headers or {})},
            )
        except (httpx.HTTPError, RuntimeError, OSError) as error:
            raise NoAnswer(_unreachable(self._login.server, error)) from None
        if response.status_code >= 500 or response.status_code == 429:
            raise NoAnswer(f"Kubernetes answered {response.status_code}: {_error(response)}")
        if response.status_code >= 400:
            raise _error(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise NoAnswer(f"{self._login.server} is not a Kubernetes API server: no JSON answer")
        return answer

    def _authorization(self) -> dict[str, str]:
        token = self._login.token
        if token is None and self._login.certificate is None:
            token = self._pod_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _pod_token(self) -> str:
        text, read = self._file_token
        if not text or time.monotonic() - read > _TOKEN_AGE_S:
            try:
                text = (_POD_FILES / "token").read_text().strip()
            except OSError:
                return ""
            self._file_token = text, time.monotonic()
        return text


def refused(error: ApiError, what: str) -> EngineUnavailable:
    """An answer that no later pass will change, as a sentence that says what to do."""
    if error.code == 401:
        return EngineUnavailable(
            f"Kubernetes refuses the login (401 {error}). The token or certificate is wrong or "
            "has expired; set a new one: manage.py engine set NAME --kubeconfig FILE"
        )
    if error.code == 403:
        return EngineUnavailable(
            f"Kubernetes does not allow Orrery to {what} (403 {error}). Apply "
            "deploy/kubernetes/engine, which holds the role that it needs."
        )
    return EngineUnavailable(f"Kubernetes refused to {what}: {error.code} {error}")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.strip():
            try:
                event = json.loads(line)
            except ValueError:
                raise NoAnswer("Kubernetes sent a watch event that is not JSON") from None
            yield event


def _error(response: httpx.Response) -> ApiError:
    try:
        status = response.json()
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    message = str(status.get("message") or response.text[:300] or response.reason_phrase)
    return ApiError(response.status_code, str(status.get("reason") or ""), message[:500])


def _unreachable(server: str, error: Exception) -> str:
    text = str(error) or type(error).__name__
    return f"{server} does not answer: {text[:300]}"


def _tls(login: Login) -> ssl.SSLContext | bool:
    if not login.server.startswith("https:"):
        return True
    try:
        context = ssl.create_default_context(cadata=login.ca) if login.ca else None
        context = context or ssl.create_default_context()
        if login.certificate and login.key:
            with tempfile.TemporaryDirectory() as folder:  # ssl reads certificates from files only
                pair = Path(folder) / "client.pem"
                pair.touch(0o600)
                pair.write_text(f"{login.certificate}\n{login.key}\n")
                context.load_cert_chain(pair)
    except (ssl.SSLError, ValueError) as error:
        raise EngineUnavailable(f"A certificate of the engine cannot be read: {error}") from None
    return context
