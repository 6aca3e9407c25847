"""The documented memory limit of each process, and the peak that a process has used."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def documented() -> dict[str, int]:
    """`{process: MiB}` of the table in `docs/architecture.md`."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Memory\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) MiB \|", section, re.MULTILINE)
    return {name: int(limit.replace(",", "")) for name, limit in rows}


def peak_mib(pid: int) -> float:
    """The largest resident size of a living process so far; 0 after its end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) / 1024 if match else 0.0
