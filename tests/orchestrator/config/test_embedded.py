"""Parts of embedded mode: broker, lock, process manager; tests/flows/test_up.py tests the whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from orchestrator.config.embedded import broker, lock, options
from orchestrator.config.embedded.processes import Child, ProcessManager

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); "
    "time.sleep(60)",
]


def until(condition: object, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_the_broker_keeps_port_password_and_data(tmp_path: Path) -> None:
    first = broker.prepare(tmp_path)
    for turn in range(2):
        server = subprocess.Popen(
            first.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis.from_url(first.url)
        try:
            until(lambda client=client: _answers(client))
            if turn == 0:
                client.set("kept", "yes")
            assert client.get("kept") == b"yes"
        finally:
            client.close()
            server.kill()
            server.wait()
        assert broker.prepare(tmp_path) == first
    assert (tmp_path / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


def test_a_second_start_names_the_first(tmp_path: Path) -> None:
    held = lock.acquire(tmp_path, "http://127.0.0.1:8000/")
    with pytest.raises(lock.AlreadyRunning, match=rf"already up .*8000.*process {os.getpid()}"):
        lock.acquire(tmp_path, "http://127.0.0.1:9000/")
    held.close()
    lock.acquire(tmp_path, "http://127.0.0.1:9000/").close()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(lock.AlreadyRunning, match="--port"):
            lock.check_port("127.0.0.1", other.getsockname()[1])


def test_the_manager_restarts_dead_processes(tmp_path: Path) -> None:
    messages: list[str] = []
    processes = ProcessManager(tmp_path, messages.append)
    processes.start(Child("sleeper", SLEEP, os.environ, stop_order=1))
    first = processes.children[0].process
    assert first is not None
    first.kill()
    first.wait()

    def again() -> bool:
        processes.watch()
        process = processes.children[0].process
        return process is not None and process.pid != first.pid

    until(again)
    assert "SIGKILL" in messages[0]
    processes.stop()


def test_stopping_kills_processes_that_ignore_sigterm(tmp_path: Path) -> None:
    processes = ProcessManager(tmp_path, lambda text: None)
    processes.start(Child("stubborn", STUBBORN, os.environ, stop_order=1, stop_timeout_s=0.3))
    processes.start(Child("sleeper", SLEEP, os.environ, stop_order=2))
    pids = [child.process.pid for child in processes.children if child.process]
    until(lambda: b"on" in processes.log_path("stubborn").read_bytes())
    processes.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_leftover_processes_of_a_killed_manager_are_stopped(tmp_path: Path) -> None:
    processes = ProcessManager(tmp_path, lambda text: None)
    processes.start(Child("sleeper", SLEEP, os.environ, stop_order=1))
    process = processes.children[0].process
    assert process is not None
    ProcessManager(tmp_path, lambda text: None).stop_leftovers()
    assert not psutil.pid_exists(process.pid)
    process.wait()


def test_options_become_settings() -> None:
    environ: dict[str, str] = {"ORRERY_PORT": "1"}
    options.apply(["--home", "/data", "--port", "8080", "--no-demo", "--devices", "2"], environ)
    assert environ == {"ORRERY_HOME": "/data", "ORRERY_PORT": "8080", "ORRERY_DEMO": "0"}
