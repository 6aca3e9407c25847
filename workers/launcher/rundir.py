"""Files of one attempt's run directory on one node: names, atomic writes, and the claim.

`order.json` is created by a hard link that fails if it exists, so an attempt starts once.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from workers.contracts.wire.names import SUPERVISOR_RANK

_CAREFUL = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_BYTES = 64 << 20
SHIPPING = "shipping"  # state of a supervisor whose attempt has ended and was reported


class RunDir:
    """Paths under `$ORRERY_HOME/runs/<run>/attempt-<n>/`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.order = path / "order.json"  # contracts.node.LaunchOrder
        self.agent = path / "agent.json"  # {node, node_file} of the claiming agent
        self.spec = path / "spec.json"
        self.supervisor = path / "supervisor.json"  # {pid, start_time, state, node, fence}
        # newest ControlOrder, from the agent to the supervisor
        self.request = path / "request.json"
        self.control = path / "control.json"  # newest request, from the supervisor to the ranks
        self.offsets = path / "offsets.json"
        self.exit = path / "exit.json"  # {class, reason, …, reported}

    def __str__(self) -> str:
        return str(self.path)

    def rank(self, rank: int) -> Path:
        """The folder of one rank; rank -1 is the supervisor."""
        return self.path / ("supervisor" if rank == SUPERVISOR_RANK else f"rank-{rank}")

    def ranks(self) -> list[int]:
        """The supervisor and every rank that has a folder."""
        numbers = [
            int(path.name[5:]) for path in self.path.glob("rank-*") if path.name[5:].isdigit()
        ]
        return [SUPERVISOR_RANK, *sorted(numbers)]

    def claim(self, order: dict[str, Any]) -> bool:
        """True for the first caller only, also after a restart.

        Raises OSError if the directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".order.{os.getpid()}.{id(order)}"
        _write_synced(temporary, json.dumps(order))
        try:
            os.link(temporary, self.order)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True


def run_dirs(home: Path) -> Iterator[RunDir]:
    """Every claimed run directory under a home, which several nodes may share."""
    for pattern in ("runs/*/attempt-*/order.json", "runs/*/attempt-*/node-*/order.json"):
        for path in home.glob(pattern):
            yield RunDir(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file is missing, incomplete or not a regular file."""
    try:
        with open_to_read(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                return {}
            data = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def open_to_read(path: Path) -> BinaryIO:
    """Open a file that a run's programs write.

    They may put a link or a pipe there, which must neither lead elsewhere nor block. Raises
    FileNotFoundError also for those and for a file that may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return open(descriptor, "rb")


def open_to_append(path: Path) -> FileIO:
    """Open a file in a run's folder, unbuffered; a link or a pipe there raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return FileIO(os.open(path, flags | _CAREFUL, 0o644), "ab")


def write_json(path: Path, data: Any) -> None:
    """Write a temporary file, sync and rename it: atomic, also over a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    _write_synced(temporary, json.dumps(data))
    os.replace(temporary, path)


def _write_synced(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(path, flags | _CAREFUL, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
