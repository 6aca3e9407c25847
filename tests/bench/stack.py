"""The environment of a benchmark: data directory, Valkey server, migrated database, PostgreSQL."""

from __future__ import annotations

import os
import shutil
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


@contextmanager
def postgresql(*, durable: bool = True) -> Iterator[str]:
    """Starts a PostgreSQL server and yields its URL.

    `durable` keeps the defaults of fsync and synchronous_commit; tests switch them off.
    """
    programs = postgresql_programs()
    assert programs is not None, (
        "PostgreSQL is not installed: initdb is neither on PATH nor in /usr/lib/postgresql"
    )
    folder = Path(tempfile.mkdtemp(prefix="orrery-bench-pg-"))
    become: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres", "postgres")
        become = ["runuser", "-u", "postgres", "--"]
    port = free_port()

    def run(*command: str | Path) -> None:
        subprocess.run([*become, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    run(programs / "initdb", "-D", folder / "data", "-U", "orrery", "-A", "trust")
    options = f"-c listen_addresses=127.0.0.1 -p {port} -k {folder}"
    if not durable:
        options += " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    control = (programs / "pg_ctl", "-D", folder / "data", "-w", "-t", "240", "-l", folder / "log")
    run(*control, "-o", options, "start")
    try:
        yield f"postgresql://orrery@127.0.0.1:{port}/postgres"
    finally:
        from django.db import connection

        connection.close()
        run(*control, "-m", "fast", "stop")
        shutil.rmtree(folder, ignore_errors=True)


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
