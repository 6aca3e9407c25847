"""The environment of a benchmark: data directory, Valkey server, migrated database, PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.flows.embedded import free_port
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def stack(*, postgres: bool = False) -> Iterator[RedisServer]:
    """Sets the environment of a fresh installation and sets up Django. Once per process."""
    home = Path(tempfile.mkdtemp(prefix="orrery-bench-"))
    server = RedisServer(home, append_only=True).start()
    key = "only for benchmarks"
    os.environ.update(ORRERY_HOME=str(home), REDIS_URL=server.url, ORRERY_SECRET_KEY=key)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")
    try:
        if postgres:
            with postgresql() as url:
                os.environ["DATABASE_URL"] = url
                _migrate()
                yield server
        else:
            os.environ.pop("DATABASE_URL", None)
            _migrate()
            yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)


class PostgresServer:
    """A PostgreSQL server of its own data folder, which can be stopped and started again.

    `durable` keeps the defaults of fsync and synchronous_commit; tests switch them off.
    """

    def __init__(self, *, durable: bool = True) -> None:
        programs = postgresql_programs()
        assert programs is not None, (
            "PostgreSQL is not installed: initdb is neither on PATH nor in /usr/lib/postgresql"
        )
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="orrery-bench-pg-"))
        # the server ends with this process, also if that is killed; PostgreSQL refuses to be root
        self._become = ["setpriv", "--pdeathsig", "INT"]
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres", "postgres")
            self._become += ["--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._port = free_port()
        data = self._folder / "data"
        initdb = [programs / "initdb", "-D", data, "-U", "orrery", "-A", "trust"]
        subprocess.run(
            [*self._become, "--", *initdb],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
        )
        options = ["-c", "listen_addresses=127.0.0.1", "-p", str(self._port)]
        options += ["-k", str(self._folder)]
        if not durable:
            off = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
            options += [word for setting in off for word in ("-c", setting)]
        self._command = [*self._become, "--", programs / "postgres", "-D", data, *options]
        self._server: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://orrery@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        log = self._folder / "log"
        with open(log, "ab") as file:
            self._server = subprocess.Popen(
                self._command, cwd=self._folder, stdout=file, stderr=file
            )
        _wait_until_ready(self._programs, self._port, self._server, log)

    def stop(self) -> None:
        """End all connections and the server."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)  # a fast shutdown
            self._server.wait(240)
            self._server = None

    def remove(self) -> None:
        """Delete the data of a stopped server."""
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def postgresql(*, durable: bool = True) -> Iterator[str]:
    """Starts a PostgreSQL server and yields its URL; `durable` as for PostgresServer."""
    server = PostgresServer(durable=durable)
    try:
        server.start()
        yield server.url
    finally:
        from django.db import connection

        connection.close()
        server.stop()
        server.remove()


def _wait_until_ready(
    programs: Path, port: int, server: subprocess.Popen[bytes], log: Path
) -> None:
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + 240
    while subprocess.run(ready).returncode != 0:
        failed = server.poll() is not None or time.monotonic() > deadline
        assert not failed, log.read_text(errors="replace")
        time.sleep(0.1)


def postgresql_programs() -> Path | None:
    """The folder with initdb and pg_ctl, or None if PostgreSQL is not installed."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


def manage(*arguments: str) -> subprocess.Popen[bytes]:
    """Starts a process of the installation, for example `manage("ingest")`."""
    return subprocess.Popen([sys.executable, "manage.py", *arguments], cwd=ROOT)


def web(port: int, processes: int = 1) -> subprocess.Popen[bytes]:
    """Starts the web processes with the options of `manage.py up`."""
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "orchestrator.config.asgi:application",
        "--port",
        str(port),
    ]
    options = ["--log-level", "warning", "--ws-per-message-deflate", "false", "--no-access-log"]
    options += ["--workers", str(processes)] if processes > 1 else []
    return subprocess.Popen([*command, *options], cwd=ROOT)


def wait_for(port: int) -> None:
    """Waits up to 60 s until a process listens on the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _migrate() -> None:
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
