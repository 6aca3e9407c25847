"""A server of the S3 protocol in a thread of the test process, and one that refuses."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from workers.store.access import Store, open_store

REGION = "us-east-1"


class S3Server:
    """moto's server; `bucket()` makes a new bucket."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self._buckets = 0

    def bucket(self) -> str:
        """The URL of a new bucket."""
        self._buckets += 1
        name = f"bucket-{os.getpid()}-{self._buckets}"
        self.open(f"s3://{name}").fs.call_s3("create_bucket", Bucket=name)
        return f"s3://{name}"

    def open(self, url: str) -> Store:
        return open_store(url=url, endpoint=self.endpoint, region=REGION, key="k", secret="s")

    def close(self) -> None:
        self._server.stop()


@contextmanager
def refusing(status: int, code: str, *, requests: int = 10**9) -> Iterator[str]:
    """The endpoint of a server that refuses each request with this error code of S3."""

    class Handler(BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = f"<Error><Code>{code}</Code><Message>refused: {code}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with mock.patch.dict(os.environ):
        yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
