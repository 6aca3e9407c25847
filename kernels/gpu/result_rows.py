"""Rows of a run, written one by one as JSON lines, so that an aborted run loses none.

`gpu-<date>-<time>.jsonl` during the run, at its end `.json` with the same rows in one document.
Does not depend on any operation.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from kernels import runtime


class ResultRows:
    """The rows of one run, in memory and on disk."""

    def __init__(self, out: Path) -> None:
        """Creates a new file in directory `out`."""
        out.mkdir(parents=True, exist_ok=True)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        self.path = out / f"gpu-{stamp}.jsonl"
        self._rows: list[dict[str, Any]] = []
        self._file = self.path.open("a")

    def write(self, kind: str, **values: Any) -> None:
        """Adds a row; it is on disk when this returns."""
        row = {"kind": kind, **values}
        self._rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> Path:
        """Replaces the lines by one JSON document; returns its path."""
        self._file.close()
        document = self.path.with_suffix(".json")
        document.write_text(json.dumps({"rows": self._rows}, indent=1) + "\n")
        self.path.unlink()
        return document


def machine(device: torch.device) -> dict[str, Any]:
    """The machine and software versions of the measurements."""
    properties = torch.cuda.get_device_properties(device)
    triton_version = None
    if runtime.HAS_TRITON:
        import triton

        triton_version = triton.__version__
    return {
        "device": properties.name,
        "arch": runtime.arch(device),
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton_version,
        "python": platform.python_version(),
        "revision": _revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _revision() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
