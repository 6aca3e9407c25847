"""Lets a root process access files with the rights of a run's user, and prepares its folders.

A run's user owns its folder and may put symbolic links there, so no process with more rights may
follow them. The kernel checks file accesses by the thread's file system user (setfsuid, Linux).
Does not start processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from workers.launcher import processes
from workers.launcher.isolation.run_user import RunUser

_libc = ctypes.CDLL(None, use_errno=True)
RUN_MODE = 0o2750  # new files get the run's group, whose members may read them


def run_folder(path: Path) -> Path:
    """The folder `runs/<run>` that contains the path of a run directory."""
    for folder in (path, *path.parents):
        if folder.parent.name == "runs":
            return folder
    return path


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """In this thread, file accesses have the rights of this user and group. Only for root."""
    if os.getuid() != 0 or not hasattr(_libc, "setfsuid"):
        yield
        return
    before_gid, before_uid = _libc.setfsgid(gid), _libc.setfsuid(uid)
    try:
        yield
    finally:
        _libc.setfsuid(before_uid)
        _libc.setfsgid(before_gid)


@contextlib.contextmanager
def as_owner(path: Path) -> Iterator[None]:
    """In this thread, act as the owner of the run's folder that contains the path, if root."""
    status = None
    if os.getuid() == 0:
        with contextlib.suppress(OSError):
            status = os.lstat(run_folder(path))  # its parent belongs to root
    if status is None or status.st_uid == 0:
        yield
        return
    with acting_as(status.st_uid, status.st_gid):
        yield


@contextlib.contextmanager
def as_agent() -> Iterator[None]:
    """In this thread of a supervisor, access files as the agent's user."""
    with acting_as(0, 0):
        yield


def become(user: RunUser) -> None:
    """Make the user's rights those of this root process, which may still return to root."""
    os.umask(0o027)
    os.setgroups(list(user.groups))
    os.setegid(user.gid)
    os.seteuid(user.uid)


def before_program(user: RunUser | None) -> None:
    """For `preexec_fn` of a supervisor's programs: SIGKILL ends them with it, and with a user
    `become` is undone, as `wrap.as_user` then changes the user permanently.
    """
    processes.die_with_parent()
    if user is not None:
        os.seteuid(0)
        os.setegid(0)


def prepare_folders(home: Path, run: str, user: RunUser | None) -> None:
    """Create `runs/<run>` for its user, with mode 700 or for the run's group too.

    A folder of another owner, from before a change of ORRERY_RUN_AS, is handed over.
    Raises OSError.
    """
    folder = home / "runs" / run
    if user is None:
        if not folder.exists():
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        return
    for parent in (home / "runs", home / "users"):
        parent.mkdir(parents=True, exist_ok=True)
        if parent.lstat().st_uid == os.geteuid():
            parent.chmod(0o711)
    user_home = home / "users" / str(user.uid)
    user_home.mkdir(exist_ok=True)
    _give(user_home, user.uid, user.gid, 0o700)
    folder.mkdir(exist_ok=True)
    status = folder.lstat()
    if status.st_uid != user.uid or status.st_gid != user.run_gid:
        for _, names, files, descriptor in os.fwalk(folder, follow_symlinks=False):
            for name in (*names, *files):
                os.chown(name, user.uid, user.run_gid, dir_fd=descriptor, follow_symlinks=False)
    _give(folder, user.uid, user.run_gid, RUN_MODE)


def _give(folder: Path, uid: int, gid: int, mode: int) -> None:
    status = folder.lstat()
    if (status.st_uid, status.st_gid, status.st_mode & 0o7777) != (uid, gid, mode):
        os.chown(folder, uid, gid, follow_symlinks=False)
        os.chmod(folder, mode)
