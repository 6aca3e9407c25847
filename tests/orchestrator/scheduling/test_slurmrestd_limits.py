"""Servers that answer too slowly, too much, or with a certificate of another authority."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.scheduling.cluster_engines.slurm import rest_requests
from orchestrator.scheduling.cluster_engines.slurm.rest import RestFailed, SlurmRest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
DOCUMENT = json.dumps({"paths": {"/slurm/v0.0.38/jobs": {}}, "jobs": []}).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(DOCUMENT) + DOCUMENT
Send = Callable[[bytes], None]


@contextlib.contextmanager
def listening(
    act: Callable[[Send], None], *, context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """A server that does `act` for every request; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(taken: socket.socket) -> None:
            with contextlib.suppress(OSError), taken:
                peer = context.wrap_socket(taken, server_side=True) if context else taken
                with peer:
                    while peer.recv(65536):
                        act(peer.sendall)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken, _ = listener.accept()
                    threading.Thread(target=serve, args=(taken,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def drip(head: bytes, part: bytes) -> Callable[[Send], None]:
    """Every read gets a little, long before its own time limit."""

    def act(send: Send) -> None:
        send(head)
        for _ in range(400):
            send(part)
            time.sleep(0.05)

    return act


def refused(url: str, *, timeout_s: float = 0.5, ca: Path | None = None) -> str:
    made = SlurmRest(url, user=None, token=None, timeout_s=timeout_s, ca=str(ca) if ca else None)
    try:
        with pytest.raises(RestFailed) as caught:
            made.jobs()
        return str(caught.value)
    finally:
        made.close()


@pytest.mark.parametrize(
    ("head", "part"),
    [(HEAD, b"x-more: 1\r\n"), (HEAD + b"content-length: 9999\r\n\r\n", b" ")],
    ids=["headers", "body"],
)
def test_an_answer_has_a_time_limit_however_it_arrives(head: bytes, part: bytes) -> None:
    with listening(drip(head, part)) as port:
        began = time.monotonic()
        assert "its answer took more than 0.5 s" in refused(f"http://127.0.0.1:{port}")
        assert time.monotonic() - began < 10, "the server sends for 20 s"


def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_requests, "LARGEST", 1 << 20)
    head = HEAD + b"content-length: %d\r\n\r\n" % (2 << 20)
    with listening(lambda send: send(head + bytes(2 << 20))) as port:
        text = refused(f"http://127.0.0.1:{port}", timeout_s=30.0)
        assert "its answer has more than 1 MiB" in text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of localhost that is its own authority; its key is next to it."""
    folder = tmp_path_factory.mktemp("certificate")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "ca.pem")]
    subprocess.run([*words.split(), *names, *files], check=True, capture_output=True)
    return folder / "ca.pem"


def test_a_certificate_of_a_sites_own_authority_needs_its_file(
    certificate: Path, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with listening(lambda send: send(WHOLE), context=context) as port:
        url = f"https://localhost:{port}"
        made = SlurmRest(url, user=None, token=None, timeout_s=30.0, ca=str(certificate))
        assert made.jobs() == made.jobs() == []
        made.close()
        assert "CERTIFICATE_VERIFY_FAILED" in refused(url, timeout_s=30.0)
        missing = tmp_path / "none.pem"
        assert f"the authorities in {missing} cannot be read" in refused(url, ca=missing)


def test_an_answer_over_tls_has_a_time_limit(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with listening(drip(HEAD, b"x-more: 1\r\n"), context=context) as port:
        began = time.monotonic()
        text = refused(f"https://localhost:{port}", timeout_s=2.0, ca=certificate)
        assert "its answer took more than 2 s" in text and time.monotonic() - began < 15
