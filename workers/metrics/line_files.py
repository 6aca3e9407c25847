"""Opens files of lines for appending. Does not depend on what the lines contain."""

from __future__ import annotations

import os
from pathlib import Path


def open_for_append(path: Path) -> int:
    """The descriptor of a file, new or cut at the end of its last complete line. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(file, end)
    return file
