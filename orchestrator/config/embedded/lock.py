"""Allows one `up` per data directory: an advisory lock that the kernel releases with its holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO, Any


class AlreadyRunning(Exception):
    """Another process has the lock or the port."""


def acquire(home: Path, url: str) -> IO[str]:
    """Lock `home/up.lock`.

    Raises AlreadyRunning with the holder. Do not close the returned file.
    """
    home.mkdir(parents=True, exist_ok=True)
    file = open(home / "up.lock", "a+")  # noqa: SIM115 -- held until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _read(file)
        file.close()
        raise AlreadyRunning(
            f"Orrery is already up in {home}: {holder.get('url', 'starting')} (process "
            f"{holder.get('pid', '?')}). "
            f"Open that page, or stop it with `kill {holder.get('pid', 'PID')}`, "
            f"or start another with --home DIR --port N."
        ) from None
    file.truncate(0)
    json.dump({"pid": os.getpid(), "url": url}, file)
    file.flush()
    os.set_inheritable(file.fileno(), False)
    return file


def check_port(host: str, port: int) -> None:
    """Raise AlreadyRunning if the address is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise AlreadyRunning(
                f"Cannot listen on {host}:{port} ({error.strerror}): another program may use it. "
                f"Start with --port N (or ORRERY_PORT), or with another --host."
            ) from None


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        return dict(json.load(file))
    except ValueError:
        return {}
