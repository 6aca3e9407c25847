"""Random bytes and frames for the live sockets of a real web process: it serves the next client.

`make test` opens a few connections; ORRERY_TEST_MATRIX=full and `make fuzz` more.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.flows.embedded import clean_environ, free_port
from tests.matrix import FULL
from tests.migrated_database import install
from tests.orchestrator.fuzz.mutations import as_json, damaged, mutated
from tests.orchestrator.fuzz.test_sockets import QUERIES, SEED

ROOT = Path(__file__).resolve().parents[3]
LONG = "ORRERY_FUZZ_MUTATIONS" in os.environ
CONNECTIONS = 600 if FULL or LONG else 60
FRAMES = 8  # of a connection
GROWTH = 100 * 2**20  # bytes of memory
TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9
WEB = ["--ws-max-size", "65536", "--ws-per-message-deflate", "false", "--log-level", "warning"]


@pytest.mark.flow
@pytest.mark.timeout(3600)
def test_a_server_survives_odd_frames(
    tmp_path: Path, migrated_database: Path, redis_url: str
) -> None:
    chance = random.Random(SEED)
    with server(tmp_path, migrated_database, redis_url) as (port, token, process):
        assert first_frame(port, token)["type"] == "heartbeat"
        before = process.memory_info().rss
        for _ in range(CONNECTIONS):
            with suppress(OSError):  # the server may close the connection at any time
                attack(port, token, chance)
        assert first_frame(port, token)["type"] == "heartbeat"
        answer = httpx.get(f"http://127.0.0.1:{port}/login/", timeout=60)
        assert answer.status_code == 200
        assert process.memory_info().rss - before < GROWTH
        assert len(process.net_connections()) < CONNECTIONS
    log = (tmp_path / "web.log").read_text()
    # uvicorn's own parser fails an assertion on some broken frames, and closes the connection
    ours = re.search(r"ASGI application|File \".*/(orchestrator|webui)/", log)
    assert ours is None, log[ours.start() - 2000 : ours.start() + 2000]


@contextmanager
def server(home: Path, database: Path, redis_url: str) -> Iterator[tuple[int, str, psutil.Process]]:
    """A web process with the options of the product; its port, a token and the process."""
    environ = {**clean_environ(), "ORRERY_HOME": str(home), "ORRERY_SECRET_KEY": "x" * 50}
    environ["REDIS_URL"] = redis_url
    (home / "static").mkdir()
    install(database, home)
    command = [sys.executable, "manage.py", "token", "admin", "--role", "admin", "--create"]
    made = subprocess.run(
        [*command, "--json"], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "orchestrator.config.asgi:application"]
    with open(home / "web.log", "wb") as log:
        web = subprocess.Popen(
            [*command, "--port", str(port), *WEB], cwd=ROOT, env=environ, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline and web.poll() is None
            try:
                if httpx.get(f"http://127.0.0.1:{port}/login/", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        token = json.loads(made.stdout)["token"]
        run = {"name": "fuzz", "spec": {"kind": "external", "external": {}}}
        made_run = httpx.post(
            f"http://127.0.0.1:{port}/api/v1/runs",
            json=run,
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )
        assert made_run.status_code == 201, made_run.text  # its frames start the topics
        yield port, token, psutil.Process(web.pid)
        assert web.poll() is None
    finally:
        web.terminate()
        web.wait(60)


def handshake(path: str, token: str) -> bytes:
    """The request that opens a socket."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: Upgrade"]
    lines += ["Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Authorization: Bearer {token}"]
    lines += ["Sec-WebSocket-Key: " + base64.b64encode(b"k" * 16).decode()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def frame(
    opcode: int, data: bytes, *, last: bool = True, mask: bool = True, length: int | None = None
) -> bytes:
    """A frame of a client; `length` is a declared length that differs from the data's."""
    size = len(data) if length is None else length
    head = bytes([opcode | (0x80 if last else 0)])
    flag = 0x80 if mask else 0
    if size < 126:
        head += bytes([flag | size])
    elif size < 2**16:
        head += bytes([flag | 126]) + struct.pack(">H", size)
    else:
        head += bytes([flag | 127]) + struct.pack(">Q", size)
    # a mask of zeros leaves the data as it is
    return head + (b"\0\0\0\0" if mask else b"") + data


def odd_frame(chance: random.Random) -> bytes:
    """A frame, valid or not, or some of them."""
    subscribe = {"type": "subscribe", "topics": ["fleet"], "after": 3}
    text = as_json(mutated(subscribe, chance)).encode("utf-8", "surrogatepass")
    return chance.choice(
        (
            frame(TEXT, text),
            frame(TEXT, damaged(text, chance)),
            frame(BINARY, damaged(text, chance)),
            frame(TEXT, text, mask=False),
            frame(TEXT, text, length=2**63 - 1),
            frame(TEXT, text, length=2**64 - 1),
            frame(TEXT, b"x" * 70_000),
            frame(TEXT, b"x", last=False) + frame(0, b"y" * 1000, last=False) * 100,
            frame(0, b"no first frame"),
            frame(chance.randrange(16), text[:100]),
            frame(TEXT | chance.choice((0x40, 0x20, 0x10)), text),
            frame(PING, b"p" * 125) * 200,
            frame(PING, b"p" * 126),
            frame(CLOSE, b"\x03"),
            frame(CLOSE, struct.pack(">H", chance.randrange(2**16)) + b"\xff"),
            frame(TEXT, text) * 300,
            bytes(chance.randrange(256) for _ in range(200)),
        )
    )


def attack(port: int, token: str, chance: random.Random) -> None:
    """One connection with a good or a changed handshake, then odd frames, then an odd end."""
    query = chance.choice([text for text in QUERIES if len(text) < 40_000])
    request = handshake(f"/ws/{chance.choice(('fleet', 'runs/1', 'x'))}/?{query}", token)
    if chance.random() < 0.3:
        request = damaged(request, chance)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        if chance.random() < 0.7:
            connection.settimeout(1.0)
            with suppress(TimeoutError):
                connection.recv(2000)
            connection.settimeout(30)
        for _ in range(FRAMES):
            data = odd_frame(chance)
            if chance.random() < 0.1:
                data = data[: chance.randrange(len(data) + 1)]
            connection.sendall(data)
        if chance.random() < 0.3:  # reset in place of an orderly end
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def first_frame(port: int, token: str) -> dict[str, object]:
    """The first frame that a new client gets."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(handshake("/ws/fleet/", token))
        data = b""
        while b"}" not in data.partition(b"\r\n\r\n")[2]:
            part = connection.recv(4096)
            assert part, data
            data += part
    body = data.partition(b"\r\n\r\n")[2]
    start = body.index(b"{")
    text = body[start : body.index(b"}", body.index(b'"type"')) + 1].decode()
    return dict(json.loads(text if text.count("{") == text.count("}") else text + "}"))
