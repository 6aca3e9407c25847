"""Opens files whose place was checked, although others may change links meanwhile.

A run's user may put a link where a file was between the check and the opening, and this process
may have more rights. Does not decide which places are allowed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def resolved_below(path: Path, folder: Path) -> Path | None:
    """The path after all links if that is below the folder (after links too), else None."""
    try:
        resolved = Path(os.path.realpath(path))
    except (OSError, ValueError):
        return None
    return resolved if resolved.is_relative_to(os.path.realpath(folder)) else None


def open_resolved(path: Path) -> BinaryIO:
    """Open a regular file at an absolute path without any link, as `resolved_below` returns it.

    FileNotFoundError also if a part of the path is a link now, or if it is a pipe or a device.
    """
    folder = os.open(path.anchor, _FOLDER)
    try:
        for part in path.parts[1:-1]:
            folder, parent = os.open(part, _FOLDER, dir_fd=folder), folder
            os.close(parent)
        descriptor = os.open(path.name, _FILE, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, error.strerror, str(path)) from None
        raise
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return open(descriptor, "rb")
