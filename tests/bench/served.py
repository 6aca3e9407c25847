"""Starts Orrery's inference server as a run does, yields its address and stops it at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.record import ROOT


@contextmanager
def served(folder: Path, spec: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yields the address `http://host:port` and the process.

    Unless the block raises, the process has exited after the block.
    """
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [
        sys.executable,
        "-m",
        "workers.inference.main",
        "--spec",
        str(folder / "spec.json"),
        "--dir",
        str(folder),
    ]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"}, stdout=log, stderr=log
        )
        try:
            address = _wait_for_address(folder, server)
            yield f"http://{address['host']}:{address['port']}", server
            (folder / "control.json").write_text(json.dumps({"action": "stop", "id": 1}))
            server.wait(60)
        finally:
            server.kill()
            server.wait()


def _wait_for_address(folder: Path, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    path = folder / "rank-0" / "events.jsonl"
    while server.poll() is None:
        for line in path.read_text().splitlines() if path.exists() else ():
            if (event := json.loads(line))["type"] == "serving":
                return dict(event["data"])
        time.sleep(0.1)
    raise SystemExit((folder / "log").read_text())
