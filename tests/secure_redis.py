"""Debian's redis-server with TLS and a certificate of a test authority, on a loopback port."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

PASSWORD = "control-plane-password"


class SecureRedis:
    """`url` is `rediss://` of the control plane's user; `ca` is the authority's certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.crt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"rediss://:{PASSWORD}@127.0.0.1:{self.port}/0"
        _certificates(folder)
        binary = shutil.which("redis-server")
        assert binary is not None
        command = [binary, "--port", "0", "--tls-port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--tls-cert-file", str(folder / "server.crt")]
        command += ["--tls-key-file", str(folder / "server.key")]
        command += ["--tls-ca-cert-file", str(self.ca), "--tls-auth-clients", "no"]
        command += ["--requirepass", PASSWORD, "--dir", str(folder), "--save", ""]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client().ping()
                return
            except redis.RedisError:
                assert self._process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def client(self, url: str = "") -> redis.Redis:
        """A client that trusts the test authority."""
        return redis.Redis.from_url(
            url or self.url, ssl_ca_certs=str(self.ca), decode_responses=True
        )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


@pytest.fixture(scope="module")
def secure_redis() -> Iterator[SecureRedis]:
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        pytest.skip("needs redis-server and openssl")
    folder = Path(tempfile.mkdtemp(prefix="orrery-tls-"))
    server = SecureRedis(folder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    authority = ["-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.crt"]
    openssl("req", "-x509", *curve, *authority, "-days", "2")
    openssl("req", *curve, "-subj", "/CN=broker", "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-extfile", "names", "-days", "2", "-out", "server.crt"),
    )
