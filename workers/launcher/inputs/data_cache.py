"""Copies of data sets on this node, one folder per fingerprint, which its runs share.

A lock per copy lets one attempt read it from the store while others wait; a second lock is held by
the attempts that use it. Does not read from the store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from workers.launcher.isolation.run_user import RunUser

FOLDER: Final = "datasets"  # in the node's home, or in the home of the run's user
KEEP_VARIABLE: Final = "ORRERY_DATASET_DAYS"
KEEP_DAYS: Final = 30.0
_POLL_S: Final = 0.15
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Stopped(Exception):
    """The attempt was stopped while it waited."""


def cache_folder(home: Path, user: RunUser | None) -> Path:
    """Where copies are. With a user per run no user can change the data of another one."""
    return (home if user is None else home / "users" / str(user.uid)) / FOLDER


def copy_folder(top: Path, fingerprint: str) -> Path:
    """The folder of one copy; it exists if the copy is complete."""
    return top / fingerprint


@contextlib.contextmanager
def locked(folder: Path, *, keep_waiting: Callable[[], bool]) -> Iterator[None]:
    """Hold the right to write the copy. Raises Stopped, OSError."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as held:
        while not _lock(held.fileno(), fcntl.LOCK_EX):
            if not keep_waiting():
                raise Stopped
            time.sleep(_POLL_S)
        yield


def use(folder: Path) -> int:
    """Mark the copy as used by this process until the returned descriptor is closed."""
    used = os.open(folder.with_suffix(".use"), os.O_RDWR | os.O_CREAT, 0o600)
    _lock(used, fcntl.LOCK_SH)
    os.utime(used)
    return used


def delete_unused(top: Path, days: float) -> list[str]:
    """Delete copies that no attempt uses, and none started for this long; returns their names."""
    deleted: list[str] = []
    if days <= 0:
        return deleted
    for mark in sorted(top.glob("*.use")):
        folder = mark.with_suffix("")
        with (
            contextlib.suppress(OSError),
            open(folder.with_suffix(".lock"), "w") as writing,
            open(mark, "r+") as used,
        ):
            if not _lock(writing.fileno(), fcntl.LOCK_EX) or not _lock(
                used.fileno(), fcntl.LOCK_EX
            ):
                continue
            if time.time() - mark.stat().st_mtime > days * 86400:
                shutil.rmtree(folder, ignore_errors=True)
                mark.unlink()
                deleted.append(folder.name)
    return deleted


def keep_days() -> float:
    """After how many days without use a copy is deleted; 0: never."""
    try:
        return float(os.environ.get(KEEP_VARIABLE) or KEEP_DAYS)
    except ValueError:
        return KEEP_DAYS


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was taken; True on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
