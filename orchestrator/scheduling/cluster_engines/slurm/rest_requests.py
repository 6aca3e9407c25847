"""GET requests whose whole answer is limited in time and size. Does not read answers."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

LARGEST: Final = 256 << 20  # bytes: about 75,000 jobs


class RequestFailed(RuntimeError):
    """No answer; the message says why."""


@dataclass
class LimitedClient:
    """One server. `socket_path`: its unix socket. `ca`: a file with the authority of its
    certificate, instead of those of this machine. `timeout_s`: for connecting, and for an answer.
    """

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    socket_path: str | None = None
    ca: str | None = None
    transport: httpx.BaseTransport | None = None
    _client: httpx.Client | None = None
    _stream: Any = field(default=None, repr=False)  # of the newest connection

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(self, path: str) -> tuple[int, bytes]:
        """HTTP status and body. Raises RequestFailed."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._disconnect()

        # httpx limits each read alone, so a server that sends single bytes would never end
        timer = threading.Timer(self.timeout_s, expire)
        timer.daemon = True
        try:
            client = self._open()
            timer.start()
            with client.stream("GET", path, extensions={"trace": self._trace}) as response:
                return response.status_code, self._body(response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if expired.is_set():
                raise RequestFailed(f"its answer took more than {self.timeout_s:g} s") from None
            raise RequestFailed(str(error) or type(error).__name__) from None
        finally:
            timer.cancel()

    def _body(self, response: httpx.Response) -> bytes:
        parts, size = [], 0
        for part in response.iter_bytes():
            size += len(part)
            if size > LARGEST:
                raise RequestFailed(f"its answer has more than {LARGEST >> 20} MiB")
            parts.append(part)
        return b"".join(parts)

    def _open(self) -> httpx.Client:
        if self._client is not None:
            return self._client
        file = os.path.expanduser(self.ca.replace("$HOME", "~", 1)) if self.ca else None
        try:
            secure = self.url.startswith("https:")
            verify = ssl.create_default_context(cafile=file) if secure else False
        except OSError as error:
            raise RequestFailed(f"the authorities in {file} cannot be read: {error}") from None
        transport = self.transport or httpx.HTTPTransport(verify=verify, uds=self.socket_path)
        self._client = httpx.Client(
            base_url=self.url,
            transport=transport,
            headers=dict(self.headers),
            timeout=self.timeout_s,
            trust_env=False,
        )
        return self._client

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember the connection; httpx calls this for each of its steps."""
        if event.endswith((".connect_tcp.complete", ".connect_unix_socket.complete")) or (
            event.endswith(".start_tls.complete")
        ):
            self._stream = info["return_value"]

    def _disconnect(self) -> None:
        """End a read that waits in another thread."""
        stream = self._stream
        known = stream.get_extra_info("socket") if stream is not None else None
        if known is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(known, socket.SHUT_RDWR)  # of TLS too, without its farewell
