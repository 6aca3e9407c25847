"""A program that floods its log with overwritten lines, and the memory of its supervisor."""

from __future__ import annotations

import contextlib
from pathlib import Path

from workers.launcher.rundir import RunDir, read_json

FLOOD = """
    line = b"\\r" * 2000 + b"\\x1b[31m<img src=x onerror=alert(1)> %d" + b"\\n"
    chunk = line.replace(b"%d", b"1") * 500
    out, left = sys.stdout.buffer, BYTES
    while left > 0:
        out.write(chunk)
        left -= len(chunk)
    out.write(b"the end\\n")
    out.flush()
"""
LOUD = """
    chunk = (b"a line of output of a loud program " * 5 + b"\\n") * 5000
    out, left = sys.stdout.buffer, BYTES
    while left > 0:
        out.write(chunk)
        left -= len(chunk)
    out.write(b"the end\\n")
    out.flush()
"""


def peak_bytes(run_dir: RunDir) -> int:
    """The supervisor's largest resident memory so far; 0 once it has ended."""
    pid = read_json(run_dir.supervisor).get("pid")
    with contextlib.suppress(OSError, TypeError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


def disk_bytes(run_dir: RunDir) -> int:
    """Disk space of all files of a run directory."""
    total = 0
    for path in run_dir.path.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total
