"""Our own server as a run has it, for benchmarks: started, where it listens, and asked to stop at
the end.
"""

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
    """Its address `http://host:port`, and the process, which has ended after the block where
    nothing was raised.
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
            told = _told(folder, server)
            yield f"http://{told['host']}:{told['port']}", server
            (folder / "control.json").write_text(json.dumps({"action": "stop", "id": 1}))
            server.wait(60)
        finally:
            server.kill()
            server.wait()


def _told(folder: Path, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    path = folder / "rank-0" / "events.jsonl"
    while server.poll() is None:
        for line in path.read_text().splitlines() if path.exists() else ():
            if (event := json.loads(line))["type"] == "serving":
                return dict(event["data"])
        time.sleep(0.1)
    raise SystemExit((folder / "log").read_text())
