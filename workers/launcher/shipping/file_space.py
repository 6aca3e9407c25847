"""Frees the disk space of the part of a file that has been read, while a program appends to it.

Linux punches a hole, so offsets stay valid. Elsewhere the file is truncated. Does not depend on
who writes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MARKER = b"[orrery: output before this point was read and its disk space freed]\n"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


def free(path: Path, until: int) -> bool:
    """Free the bytes before `until` and leave a marker; whether offsets stay valid.

    Without hole punching the whole file is truncated. Raises OSError if that fails too.
    """
    with open(path, "r+b") as file:
        if _punched(file.fileno(), until):
            os.pwrite(file.fileno(), MARKER, 0)
            return True
        file.truncate(0)
    return False


def punch(path: Path, until: int) -> bool:
    """Free the bytes before `until`, which read as zeros then; whether the system can do that."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _punched(descriptor, until)
    finally:
        os.close(descriptor)


def _punched(file: int, until: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    allocate = ctypes.CDLL(None, use_errno=True).fallocate64
    allocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(allocate(file, _KEEP_SIZE | _PUNCH_HOLE, 0, until) == 0)
